"""The structures of ik_llama.cpp's C interface, and whether a library has the same.

Structures go by value between Python and the library, so a field more or less would make it read and write the
wrong memory. Nothing in the interface tells their sizes. What can be seen is how much of a buffer the library fills
with its defaults, and whether each default stands where it is expected.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_float, c_int8, c_int32, c_uint8, c_uint32, c_void_p
from typing import Any, Final

from localspec.errors import BackendError

__all__ = ["PACKAGE_VERSION", "Batch", "CacheView", "ContextParams", "ModelParams", "check_layout"]

PACKAGE_VERSION: Final = "0.1.5"
"""Of the package ``ik-llama-cpp-python`` whose ik_llama.cpp has these structures."""

_Field = tuple[str, Any, object]
"""Name, type, and the library's own default; ``...`` where that depends on the platform."""

_F16: Final = 1  # ggml's number of the type

_MODEL: Final[Sequence[_Field]] = (
    ("devices", c_void_p, None),
    ("n_gpu_layers", c_int32, ...),
    ("mla", c_int32, 0),
    ("split_mode", c_int32, 1),
    ("main_gpu", c_int32, 0),
    ("max_gpu", c_int32, 0),
    ("ncmoe", c_int32, 0),
    ("type_k", c_int32, _F16),
    ("type_v", c_int32, _F16),
    ("max_ctx_size", c_uint32, 0),
    ("n_seq_max", c_int32, 1),
    ("n_ubatch", c_int32, 512),
    ("amb", c_int32, 0),
    ("fit_margin", c_int32, 0),
    ("fit", c_bool, False),
    ("worst_graph_tokens", c_int32, 0),
    ("type_k_first", c_int32, _F16),
    ("type_k_last", c_int32, _F16),
    ("type_v_first", c_int32, _F16),
    ("type_v_last", c_int32, _F16),
    ("n_k_first", c_int32, -1),
    ("n_k_last", c_int32, -1),
    ("n_v_first", c_int32, -1),
    ("n_v_last", c_int32, -1),
    ("tensor_split", c_void_p, None),
    ("rpc_servers", c_void_p, None),
    ("progress_callback", c_void_p, None),
    ("progress_callback_user_data", c_void_p, None),
    ("kv_overrides", c_void_p, None),
    ("tensor_buft_overrides", c_void_p, None),
    ("vocab_only", c_bool, False),
    ("use_mmap", c_bool, True),
    ("use_mlock", c_bool, False),
    ("check_tensors", c_bool, False),
    ("repack_tensors", c_bool, False),
    ("use_thp", c_bool, False),
    ("validate_quants", c_bool, False),
    ("merge_qkv", c_bool, False),
    ("merge_up_gate_exps", c_bool, False),
    ("mtp", c_bool, False),
    ("dry_run", c_bool, False),
    ("flash_attn", c_bool, True),
)

_CONTEXT: Final[Sequence[_Field]] = (
    ("seed", c_uint32, 0xFFFFFFFF),
    ("n_ctx", c_uint32, 512),
    ("n_batch", c_uint32, 2048),
    ("n_ubatch", c_uint32, 512),
    ("n_seq_max", c_uint32, 1),
    ("n_threads", c_uint32, 4),
    ("n_threads_batch", c_uint32, 4),
    ("max_extra_alloc", c_int32, 256),
    ("worst_case_tokens", c_int32, 0),
    ("rope_scaling_type", c_int32, -1),
    ("pooling_type", c_int32, -1),
    ("attention_type", c_int32, -1),
    ("rope_freq_base", c_float, 0.0),
    ("rope_freq_scale", c_float, 0.0),
    ("yarn_ext_factor", c_float, -1.0),
    ("yarn_attn_factor", c_float, -1.0),
    ("yarn_beta_fast", c_float, -1.0),
    ("yarn_beta_slow", c_float, -1.0),
    ("yarn_orig_ctx", c_uint32, 0),
    ("defrag_thold", c_float, -1.0),
    ("cb_eval", c_void_p, None),
    ("cb_eval_user_data", c_void_p, None),
    ("type_k", c_int32, _F16),
    ("type_v", c_int32, _F16),
    ("type_reduce", c_int32, _F16),
    ("type_k_first", c_int32, _F16),
    ("type_k_last", c_int32, _F16),
    ("type_v_first", c_int32, _F16),
    ("type_v_last", c_int32, _F16),
    ("n_k_first", c_int32, -1),
    ("n_k_last", c_int32, -1),
    ("n_v_first", c_int32, -1),
    ("n_v_last", c_int32, -1),
    ("logits_all", c_bool, False),
    ("embeddings", c_bool, False),
    ("offload_kqv", c_bool, True),
    ("flash_attn", c_bool, True),
    ("mla_attn", c_int32, 3),
    ("attn_max_batch", c_int32, 0),
    ("fused_moe_up_gate", c_bool, True),
    ("grouped_expert_routing", c_bool, False),
    ("fused_up_gate", c_bool, True),
    ("fused_mmad", c_bool, True),
    ("rope_cache", c_bool, False),
    ("graph_reuse", c_bool, True),
    ("min_experts", c_int32, -1),
    ("thresh_experts", c_float, 0.0),
    ("only_active_experts", c_bool, False),
    ("k_cache_hadamard", c_bool, False),
    ("v_cache_hadamard", c_bool, False),
    ("split_mode_graph_scheduling", c_bool, False),
    ("scheduler_async", c_bool, False),
    ("mtp", c_bool, False),
    ("mtp_op_type", c_int32, 0),
    ("abort_callback", c_void_p, None),
    ("abort_callback_data", c_void_p, None),
    ("offload_policy", c_void_p, None),
    ("cuda_params", c_void_p, None),
)


class ModelParams(ctypes.Structure):
    """``llama_model_params``."""

    _fields_ = [(name, kind) for name, kind, _default in _MODEL]


class ContextParams(ctypes.Structure):
    """``llama_context_params``."""

    _fields_ = [(name, kind) for name, kind, _default in _CONTEXT]


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
        ("all_pos_0", c_int32),
        ("all_pos_1", c_int32),
        ("all_seq_id", c_int32),
    ]


class CacheView(ctypes.Structure):
    """``llama_kv_cache_view``: what the library tells of its cache. Its arrays are the library's to allocate.

    ``max_contiguous`` places from ``max_contiguous_idx`` on are the longest run of free ones.
    """

    _fields_ = [
        ("n_cells", c_int32),
        ("n_seq_max", c_int32),
        ("token_count", c_int32),
        ("used_cells", c_int32),
        ("max_contiguous", c_int32),
        ("max_contiguous_idx", c_int32),
        ("cells", c_void_p),
        ("cells_sequences", c_void_p),
    ]


_ROOM: Final = 1024  # far more than any of them


class _Roomy(ctypes.Structure):
    _fields_ = [("bytes", c_uint8 * _ROOM)]


def check_layout(library: Any) -> None:
    """Make sure that a library's structures are those above.

    Args:
        library: a ``ctypes.CDLL``, or anything whose attributes give functions like its.

    Raises:
        BackendError: they are not, or functions are missing.
    """
    for name, structure, fields in (
        ("llama_model_default_params", ModelParams, _MODEL),
        ("llama_context_default_params", ContextParams, _CONTEXT),
    ):
        try:
            function = getattr(library, name)
        except AttributeError:
            raise _refusal(f"it has no function {name}") from None
        values = structure.from_buffer_copy(_returned(function))
        for field, _kind, default in fields:
            value = getattr(values, field)
            if default is not ... and value != default:
                raise _refusal(f"{name} has {value!r} where {field} = {default!r} is expected")
        size = _filled(function) if _passes_pointers_first() else None
        last = getattr(structure, fields[-1][0])
        if size is not None and not last.offset + last.size <= size <= ctypes.sizeof(structure):
            raise _refusal(f"{name} fills {size} bytes, and {ctypes.sizeof(structure)} are expected")


def _refusal(reason: str) -> BackendError:
    return BackendError(
        f"this ik_llama.cpp is not that of ik-llama-cpp-python {PACKAGE_VERSION}: {reason};"
        f" install that version, or build it with scripts/build_ik.py"
    )


def _passes_pointers_first() -> bool:
    """Whether a structure is returned through a pointer that is the first argument; on ARM it has a register."""
    return platform.machine().lower() in ("x86_64", "amd64")


def _returned(function: Any) -> bytes:
    """Return what the function returns, with room for more than it should."""
    function.argtypes, function.restype = [], _Roomy
    return bytes(function())


def _filled(function: Any) -> int:
    """Return how many bytes of a buffer the function fills: up to the last that it sets, whatever stood there."""
    function.argtypes, function.restype = [c_void_p], c_void_p
    buffers = []
    for background in (0x55, 0xAA):
        buffer = (c_uint8 * _ROOM)(*[background] * _ROOM)
        function(ctypes.addressof(buffer))
        buffers.append(bytes(buffer))
    return 1 + max((i for i, (one, other) in enumerate(zip(*buffers, strict=True)) if one == other), default=-1)
