from __future__ import annotations

from pathlib import Path

import pytest

from localspec.calibration.bandwidth import Bandwidth, bytes_per_pass, measure_memory_read
from localspec.errors import InvalidOptionError
from tests.backend.ggufs import U32, gguf, scalar, string


def test_a_pass_is_bound_by_what_it_exhausts() -> None:
    fast = Bandwidth(pass_bytes=900, pass_s=1.0, memory_bytes_per_s=1000.0)
    assert (fast.bytes_per_s, fast.share, fast.bound) == (900.0, 0.9, "memory")
    assert Bandwidth(pass_bytes=300, pass_s=1.0, memory_bytes_per_s=1000.0).bound == "compute"


@pytest.mark.parametrize("values", [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, 0.0), (1, float("nan"), 1.0)])
def test_impossible_bandwidths_are_refused(values: tuple[int, float, float]) -> None:
    with pytest.raises(InvalidOptionError, match="above 0"):
        Bandwidth(*values)


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_read(threads: int) -> None:
    assert measure_memory_read(threads, buffer_bytes=1 << 20) > 0


@pytest.mark.parametrize(("threads", "size"), [(0, 1 << 20), (4, 16)])
def test_nothing_to_read_is_refused(threads: int, size: int) -> None:
    with pytest.raises(InvalidOptionError, match="reading"):
        measure_memory_read(threads, buffer_bytes=size)


F32 = 0


def test_embedding_tables_and_idle_experts_are_not_read(tmp_path: Path) -> None:
    def size(*tensors: tuple[str, int], experts: bool = False) -> int:
        metadata = [string("general.architecture", "moe")]
        if experts:
            metadata += [scalar("moe.expert_count", U32, 8), scalar("moe.expert_used_count", U32, 2)]
        path = tmp_path / "model.gguf"
        path.write_bytes(gguf(metadata, [(name, (count // 4,), F32, count) for name, count in tensors]))
        return bytes_per_pass(path)

    assert size(("token_embd.weight", 400), ("blk.0.attn_q.weight", 80)) == 480
    assert size(("token_embd.weight", 400), ("blk.0.attn_q.weight", 80), ("output.weight", 200)) == 280
    assert size(("blk.0.ffn_up_exps.weight", 800), ("blk.0.attn_q.weight", 80), experts=True) == 280
    assert size(("blk.0.ffn_up_exps.weight", 800), ("blk.0.attn_q.weight", 80)) == 880
