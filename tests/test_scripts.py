"""The set-up behind scripts/demo.py and scripts/test.py, without installing anything."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # _checks imports _environment by this name
    specification.loader.exec_module(module)
    return module


environment = _load("_environment")
checks = _load("_checks")


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError(': Failed to establish a new connection')", "could not be reached"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
        ("CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage", "compiler is needed"),
        ("something new", "docs/troubleshooting.md"),
    ],
)
def test_a_failed_installation_is_explained(line, advice, monkeypatch):
    monkeypatch.setattr(environment, "has_compiler", lambda: True)
    assert advice in environment.diagnose(["Collecting numpy", line])


def test_a_missing_compiler_is_the_reason_where_nothing_else_is(monkeypatch):
    monkeypatch.setattr(environment, "has_compiler", lambda: False)
    assert "compiler is needed" in environment.diagnose(["ERROR: Failed building wheel"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looked for differently elsewhere")
def test_compilers_are_found_on_the_path_or_by_their_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert not environment.has_compiler()
    for name in ("gcc", "my-c++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert not environment.has_compiler()
    monkeypatch.setenv("CXX", "my-c++ -m64")
    assert environment.has_compiler()
    assert "build-essential" in environment.compiler_hint()


@pytest.mark.parametrize(("written", "shown"), [(3, range(3)), (40, range(25, 40))])
def test_a_failed_child_shows_the_end_of_its_output_and_where_the_rest_is(written, shown, tmp_path):
    log = tmp_path / "log"
    log.write_text("of an earlier step\n")
    script = f"print(*range({written}), sep='\\n'); raise SystemExit(3)"
    with pytest.raises(environment.SetupError) as caught:
        environment.run_logged([sys.executable, "-c", script], log, "It failed.")
    first, *middle, _advice, last = str(caught.value).splitlines()
    assert first.startswith("It failed.")
    assert middle == [f"  | {number}" for number in shown]
    assert last.endswith(str(log))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_environment_is_refused_and_left_alone(kind, tmp_path):
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("precious")
    else:
        place.mkdir()
        (place / "precious").write_text("precious")
    with pytest.raises(environment.SetupError, match="set LOCALSPEC_VENV"):
        environment.make_environment(place, place / "bin" / "python")
    assert (place if kind == "file" else place / "precious").read_text() == "precious"


def test_the_stamp_follows_what_decides_the_content(tmp_path, monkeypatch):
    (tmp_path / "requirements").mkdir()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    wanted = environment.fingerprint()
    assert not environment.is_current(tmp_path, "runtime", wanted)
    (tmp_path / "localspec-dev.stamp").write_text(wanted)
    assert environment.is_current(tmp_path, "dev", wanted)
    assert environment.is_current(tmp_path, "runtime", wanted)
    (tmp_path / "localspec-dev.stamp").rename(tmp_path / "localspec-runtime.stamp")
    assert not environment.is_current(tmp_path, "dev", wanted)
    for name in ("pyproject.toml", "models.toml", "requirements/runtime.txt", "requirements/dev.txt"):
        before = environment.fingerprint()
        (tmp_path / name).write_text("changed")
        assert environment.fingerprint() != before, name
    assert not environment.is_current(tmp_path, "runtime", environment.fingerprint())


@pytest.mark.skipif(os.name == "nt", reason="process groups are POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_stops_grandchildren_as_well(number):
    grandchild = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    # A child that ends at once and leaves its own children behind.
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, "
    child += f"'-c', {grandchild!r}]); time.sleep(60)"
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import _environment as e\n"
        f"sys.exit(e.guarded(lambda: e.run([sys.executable, '-c', {child!r}])))"
    )
    command = [sys.executable, "-c", program]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert running.stdout is not None
    pid = int(running.stdout.readline())
    running.send_signal(number)
    try:
        running.communicate(timeout=20)  # returns when nobody holds the pipe any more
    except subprocess.TimeoutExpired:
        os.kill(pid, signal.SIGKILL)
        raise
    assert running.returncode == 130


def test_pytest_closing_lines_are_recognised():
    for line in (
        "======= 3 passed, 2 deselected in 0.12s =======",
        "=== 1 failed, 20 passed in 65.32s (0:01:05) ===",
        "============ no tests ran in 0.01s ============",
    ):
        assert checks._PYTEST_CLOSING.match(line)
    assert not checks._PYTEST_CLOSING.match("=========== short test summary info ===========")


def test_the_models_to_fetch_have_names_in_the_registry():
    from localspec.registry import load

    assert set(checks.TEST_MODELS) <= set(load().models)


def test_a_failed_check_is_named_and_does_not_stop_the_others(capsys):
    report = checks.Report()
    report.run("first", lambda: 1)
    report.run("crashed", lambda: -11)
    report.run("third", lambda: 0)
    report.closing_lines.append("=== 1 passed in 0.01s ===")
    report.print()
    out = capsys.readouterr().out.splitlines()
    assert report.failed == ["first", "crashed"]
    assert out[-2:] == ["Failed: first, crashed", "=== 1 passed in 0.01s ==="]
    assert any("signal 11" in line for line in out)


@pytest.mark.parametrize("script", ["demo.py", "test.py"])
def test_an_old_python_gets_one_line(script):
    # The version is a fact of the interpreter; telling it another one runs the same lines.
    program = (
        "import sys, runpy; sys.version_info = (3, 10, 4)\n"
        f"runpy.run_path({str(ROOT / 'scripts' / script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Python 3.11 or newer; this is 3.10" in done.stderr


# --- building ik_llama.cpp: its sources, which a build that goes on finds again ------------------------------------


def _package(path: Path, version: str, *, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"ik_llama_cpp_python-{version}/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def test_sources_are_unpacked_whole_or_not_at_all(tmp_path):
    builder = _load("build_ik")
    inside = "vendor/ik_llama.cpp"
    version = builder.PACKAGE_VERSION
    files = {f"{inside}/CMakeLists.txt": "project", f"{inside}/src/a.cpp": "int a;" + 100_000 * " "}
    package = _package(tmp_path / "p.tar.gz", version, files=files)
    torn = tmp_path / "torn.tar.gz"
    torn.write_bytes(package.read_bytes()[:-60])
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises((OSError, EOFError, tarfile.TarError)):
        builder.unpack(torn, work)
    assert not list(work.iterdir())
    source = builder.unpack(package, work)
    assert (source / "src" / "a.cpp").stat().st_size > 100_000
    package.unlink()
    assert builder.unpack(package, work) == source, "it is there"


def test_sources_of_another_version_are_not_built(tmp_path):
    builder = _load("build_ik")
    other = {"vendor/ik_llama.cpp/CMakeLists.txt": "project"}
    with pytest.raises(ValueError, match="not the source package of"):
        builder.unpack(_package(tmp_path / "other.tar.gz", "0.0.9", files=other), tmp_path)
    with pytest.raises(ValueError, match="not the source package of"):
        builder.unpack(_package(tmp_path / "bare.tar.gz", builder.PACKAGE_VERSION, files={"a": "b"}), tmp_path)


CHOICE = """#include "ggml-common.h"
bool prepare() {
            return iqk_set_kernels_kquants(ne00, typeA, typeB, mm.funcs, mm.func16);
            return iqk_set_kernels_legacy_quants(ne00, typeA, typeB, mm.funcs, mm.func16);
}
            return iqk_set_kernels_kquants(ne00, typeA, typeB, m.funcs, m.func16);
"""


def test_kernels_are_put_into_the_sources_once(tmp_path):
    builder = _load("build_ik")
    place = tmp_path / builder.CHOICE
    place.parent.mkdir(parents=True)
    place.write_text(CHOICE)
    builder.add_kernels(tmp_path)
    text = place.read_text()
    for line in (
        '#include "ik_kernels.h"',
        "return iqk_set_kernels_kquants(ne00, typeA, typeB, mm.funcs, mm.func16)"
        " && localspec::use_kernels(typeA, mm.funcs);",
        "return iqk_set_kernels_legacy_quants(ne00, typeA, typeB, mm.funcs, mm.func16)"
        " && localspec::use_kernels(typeA, mm.funcs);",
    ):
        assert text.count(line) == 1
    assert text.count("use_kernels") == 2, "other processors keep what they have"
    header = place.with_name("ik_kernels.h")
    assert header.read_text() == builder.KERNELS.read_text()
    written = [file.stat().st_mtime_ns for file in (place, header)]
    builder.add_kernels(tmp_path)
    assert [file.stat().st_mtime_ns for file in (place, header)] == written, "nothing to compile again"


def test_a_build_shows_how_far_it_is_and_its_warnings_where_it_fails(capfd):
    builder = _load("build_ik")
    script = "print('[ 37%] Building'); print('warning: may be used'); print('[3/4] Linking'); raise SystemExit({})"
    builder._run_quietly([sys.executable, "-c", script.format(0)])
    assert capfd.readouterr().err.splitlines() == ["[ 37%] Building", "[3/4] Linking"]
    with pytest.raises(subprocess.CalledProcessError):
        builder._run_quietly([sys.executable, "-c", script.format(2)])
    assert "warning: may be used" in capfd.readouterr().err


def test_other_sources_get_no_kernels(tmp_path):
    builder = _load("build_ik")
    place = tmp_path / builder.CHOICE
    place.parent.mkdir(parents=True)
    place.write_text(CHOICE.replace("_kquants", "_other"))
    with pytest.raises(ValueError, match=r"iqk_set_kernels_kquants.* 0 times; once is expected"):
        builder.add_kernels(tmp_path)
    assert place.read_text() == CHOICE.replace("_kquants", "_other")


def test_a_build_that_cannot_begin_is_said_in_a_line(tmp_path, monkeypatch, capsys):
    builder = _load("build_ik")
    monkeypatch.setattr(builder.shutil, "which", lambda tool: None if tool == "c++" else tool)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(
        sys, "argv", ["build_ik.py", "--work", str(tmp_path), "--source", str(tmp_path / "none.tar.gz")]
    )
    assert builder.main() == 1
    assert capsys.readouterr().err == "build_ik: there is no c++; install CMake and a C++ compiler\n"
    monkeypatch.setenv("CXX", "clang++")
    assert builder.main() == 1
    assert "none.tar.gz" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["build_ik.py", "--jobs", "0"])
    assert builder.main() == 1
    assert "--jobs is 0" in capsys.readouterr().err
