"""Whole model files of a few kilobytes with random weights, for kinds of models no small real file is at hand of."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tests.backend.ggufs import F32, I32, U32, gguf, numbers, scalar, string, strings

WIDTH, INNER, STATE, CONV, RANK, LAYERS = 32, 64, 8, 4, 2, 2
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ abcdefghijklmnopqrstuvwxyz"]
_TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(TOKENS) - 259)]  # unknown, control, byte, normal


def write_mamba(path: Path) -> Path:
    """Write a Mamba model: its state is recurrent, so it cannot forget a part of a sequence."""
    shapes = {"token_embd.weight": (WIDTH, len(TOKENS)), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm.weight": (WIDTH,),
                "ssm_in.weight": (WIDTH, 2 * INNER),
                "ssm_conv1d.weight": (CONV, INNER),
                "ssm_conv1d.bias": (INNER,),
                "ssm_x.weight": (INNER, RANK + 2 * STATE),
                "ssm_dt.weight": (RANK, INNER),
                "ssm_dt.bias": (INNER,),
                "ssm_a": (STATE, INNER),
                "ssm_d": (INNER,),
                "ssm_out.weight": (INNER, WIDTH),
            }.items()
        }
    return _write(
        path,
        "mamba",
        shapes,
        {"ssm.conv_kernel": CONV, "ssm.inner_size": INNER, "ssm.state_size": STATE, "ssm.time_step_rank": RANK},
    )


def write_llama(path: Path, *, seed: int = 0) -> Path:
    """Write a Llama model: attention, whose cache can be cut and copied anywhere."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (WIDTH, len(TOKENS)),
        "output_norm.weight": (WIDTH,),
        "output.weight": (WIDTH, len(TOKENS)),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (WIDTH,),
                "attn_q": (WIDTH, WIDTH),
                "attn_k": (WIDTH, WIDTH),
                "attn_v": (WIDTH, WIDTH),
                "attn_output": (WIDTH, WIDTH),
                "ffn_norm": (WIDTH,),
                "ffn_gate": (WIDTH, INNER),
                "ffn_up": (WIDTH, INNER),
                "ffn_down": (INNER, WIDTH),
            }.items()
        }
    sizes = {"feed_forward_length": INNER, "attention.head_count": 2, "rope.dimension_count": WIDTH // 2}
    return _write(path, "llama", shapes, sizes, seed=seed)


def write_unknown(path: Path) -> Path:
    """Write a sound file of an architecture that no build of llama.cpp knows."""
    return _write(path, "perpetuum", {"token_embd.weight": (WIDTH, len(TOKENS))}, {})


def _write(
    path: Path, architecture: str, shapes: dict[str, tuple[int, ...]], sizes: dict[str, int], *, seed: int = 0
) -> Path:
    rng = np.random.default_rng(seed)
    metadata = [
        string("general.architecture", architecture),
        scalar("general.file_type", U32, 0),
        *(
            scalar(f"{architecture}.{key}", U32, value)
            for key, value in {
                "block_count": LAYERS,
                "context_length": 256,
                "embedding_length": WIDTH,
                "feed_forward_length": 0,
                "attention.head_count": 0,
                **sizes,
            }.items()
        ),
        scalar(f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5),
        string("tokenizer.ggml.model", "llama"),
        strings("tokenizer.ggml.tokens", TOKENS),
        numbers("tokenizer.ggml.scores", F32, [0.0] * len(TOKENS)),
        numbers("tokenizer.ggml.token_type", I32, _TYPES),
        scalar("tokenizer.ggml.bos_token_id", U32, 1),
        scalar("tokenizer.ggml.eos_token_id", U32, 2),
        scalar("tokenizer.ggml.unknown_token_id", U32, 0),
    ]
    data = b""
    for name, shape in shapes.items():
        values = rng.standard_normal(math.prod(shape)) * (1.0 if "embd" in name else 0.3)
        if name.endswith("ssm_a"):
            values = -np.abs(values) - 0.1  # a state that decays
        elif name.endswith("norm.weight"):
            values = np.ones_like(values)
        raw = values.astype("<f4").tobytes()
        data += raw + bytes(-len(raw) % 32)
    tensors = [(name, shape, 0, 4 * math.prod(shape)) for name, shape in shapes.items()]
    empty = gguf(metadata, tensors)
    path.write_bytes(empty[: -len(data)] + data)
    return path
