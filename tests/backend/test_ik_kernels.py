"""Kernels for AVX-512 that scripts/build_ik.py adds to ik_llama.cpp, compiled without it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NEEDED = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}


def _has_avx512() -> bool:
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split()) >= NEEDED
    except OSError:
        return False


needs_avx512 = pytest.mark.skipif(
    not (_has_avx512() and shutil.which("c++")), reason="needs a processor with AVX-512, and a C++ compiler"
)


def _outcome(folder: Path, header: str) -> list[str]:
    (folder / "ik_kernels.h").write_text(header, encoding="utf-8")
    source = Path(__file__).with_name("ik_kernels.cpp")
    command = ["c++", "-std=c++17", "-O1", "-march=native", f"-I{folder}", source, "-o", folder / "kernels"]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([folder / "kernels"], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@needs_avx512
def test_products_are_what_the_formats_mean_whatever_the_number_of_columns(tmp_path):
    """Random weights; one to eight columns, whole and half pairs of groups, all outputs; rounded as is said."""
    lines = _outcome(tmp_path, (SCRIPTS / "ik_kernels.h").read_text(encoding="utf-8"))
    # 23 groups of four rows, two lengths, for K-quants; of eight rows, four lengths, for the rest; 1 + … + 8 columns.
    assert lines == [f"{36 * 23 * (3 * 2 * 4 + 2 * 4 * 8)} compared"]


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_other_processors_keep_the_kernels_they_have(tmp_path):
    source = tmp_path / "other.cpp"
    source.write_text('#include "ik_kernels.h"\nint main() { int none; return !localspec::use_kernels(0, none); }\n')
    subprocess.run(["c++", "-std=c++17", f"-I{SCRIPTS}", source, "-o", tmp_path / "other"], check=True)
    subprocess.run([tmp_path / "other"], check=True)


@needs_avx512
@pytest.mark.parametrize(
    ("right", "wrong", "name"),
    [
        ("_mm512_srli_epi16(two, 2), high", "_mm512_srli_epi16(two, 1), high", "q4_k"),
        ("_mm512_srli_epi16(fifth, 3)", "_mm512_srli_epi16(fifth, 2)", "q5_k"),
        ("_mm512_slli_epi16(upper, 2)", "_mm512_slli_epi16(upper, 1)", "q6_k"),
        ("i >= whole", "i > whole", "q4_0"),
        ("parts - parts%4", "parts - (parts%4 == 2 ? 0 : parts%4)", "q8_0"),
        (
            "_mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums[iy]), acc[iy])",
            "acc[iy] + scale*_mm512_cvtepi32_ps(sums[iy])",
            "q6_k",
        ),
        ("(ix + 4)*bx) : a", "ix*bx) : a", "q4_k"),
    ],
)
def test_a_broken_kernel_is_noticed(right, wrong, name, tmp_path):
    header = (SCRIPTS / "ik_kernels.h").read_text(encoding="utf-8")
    assert right in header
    assert any(re.match(name, line) for line in _outcome(tmp_path, header.replace(right, wrong)))
