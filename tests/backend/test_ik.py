"""The ik_llama.cpp backend: what is checked before it is trusted, and every test of a backend run with it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localspec.backend import binding, ik_library
from localspec.backend.choice import backend_in_use, identity_at_hand
from localspec.backend.ik_layout import _CONTEXT, _MODEL, ContextParams, ModelParams, check_layout
from localspec.backend.ik_library import find_library, library_names, note_build
from localspec.errors import BackendError
from tests.backends import BACKEND, VARIABLE

ROOT = Path(__file__).resolve().parents[2]


# --- a library with the wrong structures --------------------------------------------------------------------------


def defaults(structure: type[ctypes.Structure], fields: Any) -> ctypes.Structure:
    return structure(**{name: value for name, _kind, value in fields if value not in (..., None)})


class FakeFunction:
    """Returns a structure as native code does: into a buffer of the caller, or by value."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, address: int | None = None) -> Any:
        if address is None:
            return self.restype.from_buffer_copy(self.content.ljust(ctypes.sizeof(self.restype), b"\x01"))
        ctypes.memmove(address, self.content, len(self.content))
        return address


class FakeLibrary:
    def __init__(self, change: Callable[[str, bytes], bytes] = lambda _name, content: content) -> None:
        model, context = defaults(ModelParams, _MODEL), defaults(ContextParams, _CONTEXT)
        self.llama_model_default_params = FakeFunction(change("model", bytes(model)))
        self.llama_context_default_params = FakeFunction(change("context", bytes(context)))


def test_the_known_layout_is_accepted() -> None:
    check_layout(FakeLibrary())


@pytest.mark.parametrize("which", ["model", "context"])
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:4] + b"\0\0\0\0" + content[4:],
        lambda content: content[:-16],
        lambda content: content + b"\1" * 8,
        lambda content: content[:-40] + content[-32:],
        lambda content: content[:28] + content[32:],
    ],
    ids=["a field more at the start", "fields fewer", "fields more", "a field fewer near the end", "a field fewer"],
)
def test_a_library_with_other_structures_is_refused(which: str, change: Callable[[bytes], bytes]) -> None:
    library = FakeLibrary(lambda name, content: change(content) if name == which else content)
    with pytest.raises(BackendError, match=rf"llama_{which}_default_params .*scripts/build_ik\.py"):
        check_layout(library)


def test_a_default_elsewhere_is_named() -> None:
    def change(name: str, content: bytes) -> bytes:
        params = ContextParams.from_buffer_copy(content) if name == "context" else None
        if params is None:
            return content
        params.n_threads = 7
        return bytes(params)

    with pytest.raises(BackendError, match=r"has 7 where n_threads = 4 is expected"):
        check_layout(FakeLibrary(change))


def test_a_library_without_the_functions_is_refused() -> None:
    with pytest.raises(BackendError, match="no function llama_model_default_params"):
        check_layout(object())


# --- finding it ---------------------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(ik_library.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(ik_library.importlib.util, "find_spec", lambda name: None)
    return tmp_path


def test_no_library_at_all(nowhere: Path) -> None:
    with pytest.raises(BackendError, match=r"localspec\[ik\].*build_ik\.py.*--backend llamacpp"):
        find_library()
    assert identity_at_hand("ik") is None


def test_a_named_library_that_is_not_there(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ik_library.LIBRARY_VARIABLE, str(nowhere / "gone.so"))
    with pytest.raises(BackendError, match=r"IK_LLAMA_CPP_LIB_PATH is .*gone\.so.*no such file"):
        find_library()


def test_what_was_built_here_is_found_on_this_processor_only(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ik_library.built_directory()
    directory.mkdir(parents=True)
    library, kernels = (directory / name for name in library_names())
    library.write_bytes(b"one")
    kernels.write_bytes(b"two")
    with pytest.raises(BackendError):
        find_library()
    note_build(directory)
    assert find_library() == library
    before = identity_at_hand("ik")
    kernels.write_bytes(b"others")
    assert before is not None
    assert identity_at_hand("ik") != before
    monkeypatch.setattr(ik_library, "cpu_name", lambda: "another")
    with pytest.raises(BackendError):
        find_library()


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    done = subprocess.run(
        [sys.executable, "-c", "import localspec.backend.ik"],
        env=os.environ | {ik_library.LIBRARY_VARIABLE: str(broken)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "BackendError: " in done.stderr.splitlines()[-1]
    assert "broken.so cannot be loaded" in done.stderr.splitlines()[-1]


# --- one in each process ------------------------------------------------------------------------------------------


def test_a_process_belongs_to_one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_claimed", None)
    assert backend_in_use() is None
    binding.claim_process("llama.cpp")
    binding.claim_process("llama.cpp")
    assert backend_in_use() == "llamacpp"
    with pytest.raises(BackendError, match=r"runs llama\.cpp, and ik_llama\.cpp cannot be loaded beside it"):
        binding.claim_process("ik_llama.cpp")


def require_library() -> None:
    try:
        find_library()
    except BackendError as error:
        pytest.skip(str(error))


USE = """
import json, sys
from localspec import load_pair
session = load_pair(target=sys.argv[1], context=128, threads=1, backend="ik")
result = session.generate("The capital of France is", max_tokens=8, raw=True, seed=1)
print(json.dumps([len(result.tokens), [n for n in ("llama_cpp", "ik_llama_cpp") if n in sys.modules]]))
try:
    import localspec.backend.llamacpp
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.model
def test_with_it_nothing_imports_llama_cpp(smollm2_path: Path) -> None:
    require_library()
    command = [sys.executable, "-c", USE, str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    num_tokens, imported = json.loads(lines[0])
    assert num_tokens >= 1
    assert imported == []
    assert lines[1] == "BackendError"
    assert done.stderr == ""


STUCK = """
import sys
from pathlib import Path
from localspec.backend import Span
from localspec.backend.ik import BINDING, IkContext, IkModel
from localspec.errors import EvaluationError
context = IkContext(IkModel(Path(sys.argv[1])), capacity=64, num_sequences=2, threads=1)
context.decode([Span(0, [300, 400, 500], 0)])
context.decode([Span(1, [600, 700], 0)])
context.truncate(0, 1)  # leaves a hole before what the other holds
update = BINDING._native.llama_kv_cache_update
for stuck in (lambda _context: 1, lambda _context: 0):
    BINDING._native.llama_kv_cache_update = stuck
    try:
        context.decode([Span(1, [800], 1)])
    except EvaluationError as error:
        print(error)
BINDING._native.llama_kv_cache_update = update
context.decode([Span(1, [800], 1)])
print([context.recount(sequence) for sequence in range(2)])
"""


@pytest.mark.model
def test_a_cache_that_keeps_its_holes_is_an_error(smollm2_path: Path) -> None:
    """Rows would be of a part of the text; and nothing is lost by it."""
    require_library()
    command = [sys.executable, "-c", STUCK, str(smollm2_path)]
    *errors, lengths = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()
    assert ["cannot be moved together" in error for error in errors] == [True, True]
    assert lengths == "[1, 3]"


ROWS = """
import sys
import numpy as np
from pathlib import Path
from localspec.backend import Span
from localspec.backend.ik import BINDING, IkContext, IkModel
context = IkContext(IkModel(Path(sys.argv[1])), capacity=64, threads=1)
tokens = list(range(1000, 1040))
context.decode([Span(0, tokens[:20], 0)])
def rows(*sizes):
    context.truncate(0, 20)
    found = [context.decode([Span(0, tokens[context.length(0) :][:n], n)]).copy() for n in sizes]
    return np.concatenate(found)
one_by_one = rows(*[1] * 12)
print("localspec's kernels" in BINDING.build())
print([bool(np.array_equal(one_by_one, rows(*sizes))) for sizes in ((2,) * 6, (3, 4, 5), (12,), (1, 8, 3))])
"""


@pytest.mark.model
def test_rows_do_not_depend_on_the_size_of_the_pass_with_kernels_of_our_own(qwen_target_path: Path) -> None:
    require_library()
    command = [sys.executable, "-c", ROWS, str(qwen_target_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    own, equal = done.stdout.splitlines()
    if own != "True":
        pytest.skip("this library has none")
    assert equal == str([True] * 4)


@pytest.mark.model
@pytest.mark.skipif(BACKEND == "ik", reason="these are the tests that this one runs")
@pytest.mark.parametrize(
    "tests",
    [
        "tests/backend/test_contract.py",
        "tests/backend/test_cut.py",
        "tests/test_exactness_real.py",
        "tests/test_laws_real.py",
    ],
)
def test_what_holds_with_llama_cpp_holds_with_ik(tests: str) -> None:
    require_library()
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "model", tests]
    done = subprocess.run(command, env=os.environ | {VARIABLE: "ik"}, capture_output=True, text=True, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
