"""What scripts/demo.py and scripts/test.py share: a virtual environment that holds the locked versions.

Standard library only, because it runs before anything is installed. Nothing here deletes anything: an
environment that cannot be used is named, and its owner decides.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal

Lock = Literal["runtime", "dev"]

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = os.name == "nt"

PIPE = subprocess.PIPE

_HEARTBEAT_S = 20.0
_GRACE_S = 10.0  # for an interrupted child to leave by itself
_SHOWN_LINES = 15

_COMPILER_HINT = {
    "linux": "Debian, Ubuntu: sudo apt install build-essential; Fedora: sudo dnf install gcc-c++ make; "
    "Arch: sudo pacman -S base-devel; Alpine: apk add build-base linux-headers",
    "darwin": "xcode-select --install",
    "win32": "install 'Build Tools for Visual Studio' with the workload 'Desktop development with C++', "
    "for example: winget install Microsoft.VisualStudio.2022.BuildTools",
}


class SetupError(Exception):
    """The set-up cannot go on; the message is for the user."""


def say(text: str) -> None:
    """Announce a stage."""
    print(f"== {text}", flush=True)


def note(text: str) -> None:
    """Say something within a stage."""
    print(f"   {text}", flush=True)


def guarded(main: Callable[[], int]) -> int:
    """Run ``main``; what goes wrong becomes a message and an exit code: 1, or 130 when interrupted."""

    def end(signum: int, frame: object) -> None:
        raise KeyboardInterrupt  # so that children are stopped on the way out

    signal.signal(signal.SIGTERM, end)
    try:
        return main()
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Running it again goes on from here.", file=sys.stderr)
        return 130


# --- child processes ---


def spawn(command: Sequence[str | Path], stdout: IO[bytes] | int | None = None) -> subprocess.Popen[bytes]:
    """Start a child in the checkout, its errors with its output, in a process group of its own.

    With a group of its own a compiler started four levels down is stopped with its parents, and Ctrl-C
    reaches each exactly once, through ``stop``.
    """
    misleading = ("PYTHONHOME", "PYTHONPATH", "PIP_USER", "PIP_TARGET")
    clean = {name: value for name, value in os.environ.items() if name not in misleading}
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=clean,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=None if stdout is None else subprocess.STDOUT,
        process_group=None if WINDOWS else 0,
    )


def stop(child: subprocess.Popen[bytes]) -> None:
    """Interrupt a child and all its descendants; kill what does not leave within ten seconds."""
    if WINDOWS:  # the console has sent Ctrl-C to all of them already
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            subprocess.run(["taskkill", "/T", "/F", "/PID", str(child.pid)], capture_output=True, check=False)
        return
    for number, patience_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue


def run(command: Sequence[str | Path]) -> int:
    """Run a child on this terminal; returns its exit code."""
    child = spawn(command)
    try:
        return child.wait()
    except BaseException:
        stop(child)
        raise


def run_logged(command: Sequence[str | Path], log: Path, failure: str) -> None:
    """Run a child whose output goes to ``log``, with a sign of life every 20 s.

    Raises SetupError with ``failure``, the end of the log, a diagnosis and the log's path if the child fails.
    """
    with log.open("ab") as sink:
        start_of_output = sink.tell()
        started = time.monotonic()
        child = spawn(command, sink)
        try:
            while True:
                try:
                    code = child.wait(_HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    last = (_tail(log, start_of_output) or ["starting"])[-1].strip()
                    note(f"{time.monotonic() - started:4.0f} s  {last[:90]}")
        except BaseException:
            stop(child)
            raise
    if code != 0:
        output = _tail(log, start_of_output)
        shown = "\n".join(f"  | {line}" for line in output[-_SHOWN_LINES:])
        raise SetupError(f"{failure} The last lines:\n{shown}\n{diagnose(output)}\nThe whole log: {log}")


def _tail(log: Path, start: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(start)
        return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def diagnose(output: Sequence[str]) -> str:
    """The likely reason for a failed installation, from pip's output, and what to do about it."""
    text = "\n".join(output)

    def said(*phrases: str) -> bool:
        return any(phrase in text for phrase in phrases)

    if said("No space left on device", "not enough space on the disk"):
        return "The disk is full: about 1 GB is needed here, besides the models."
    if said("NewConnectionError", "Failed to establish", "name resolution", "ConnectTimeout", "ProxyError"):
        return "The package index could not be reached: check the network and pip's proxy and index settings."
    if said("Killed signal", "Killed", "out of memory"):
        return "The compiler ran out of memory: set CMAKE_BUILD_PARALLEL_LEVEL=1 and try again."
    if not has_compiler() or said("CMAKE_C_COMPILER", "CMAKE_CXX_COMPILER"):
        return f"A C and C++ compiler is needed to build llama-cpp-python. {compiler_hint()}"
    return "docs/troubleshooting.md lists what is known to go wrong."


# --- compilers ---


def has_compiler() -> bool:
    """Whether a C and a C++ compiler seem to be at hand."""
    if sys.platform == "darwin":  # /usr/bin/cc is there even without the tools, and opens a dialogue when run
        return subprocess.run(["xcode-select", "-p"], capture_output=True, check=False).returncode == 0
    if WINDOWS and _visual_studio():
        return True

    def found(variable: str, names: Sequence[str]) -> bool:
        given = os.environ.get(variable, "").split()[:1]
        return any(shutil.which(name) for name in (given or names))

    return found("CC", ("cc", "gcc", "clang", "cl")) and found("CXX", ("c++", "g++", "clang++", "cl"))


def _visual_studio() -> bool:
    base = os.environ.get("PROGRAMFILES(X86)")  # names know no case there
    locator = Path(base or "") / "Microsoft Visual Studio" / "Installer" / "vswhere.exe"
    if not base or not locator.is_file():
        return False
    tools = "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"
    command = [str(locator), "-products", "*", "-requires", tools, "-property", "installationPath"]
    return bool(subprocess.run(command, capture_output=True, check=False).stdout.strip())


def compiler_hint() -> str:
    """How to get a compiler on this system, in one line."""
    return _COMPILER_HINT.get(sys.platform, "Install a C and C++ compiler")


# --- the environment ---


def prepare(lock: Lock) -> Path:
    """Make the virtual environment hold ``requirements/<lock>.txt`` and this checkout; returns its Python.

    Quick when nothing changed since the last time: a stamp holds the hash of all that decides the content.
    """
    folder = Path(os.environ.get("LOCALSPEC_VENV") or ROOT / ".venv").expanduser().absolute()
    python = folder / ("Scripts/python.exe" if WINDOWS else "bin/python")
    wanted = fingerprint()
    if python.exists() and is_current(folder, lock, wanted):
        say(f"Virtual environment: {folder} is up to date")
        return python
    say(f"Virtual environment: {folder}")
    make_environment(folder, python)
    log = folder / "localspec-setup.log"
    log.write_bytes(b"")
    requirements = ROOT / "requirements" / f"{lock}.txt"
    count = sum(line[:1].isalnum() for line in requirements.read_text("utf-8").splitlines())
    say(f"Installing up to {count} packages at the versions in requirements/{lock}.txt")
    note("llama-cpp-python is compiled here unless pip finds it built: about 4 minutes on 2 cores.")
    if not has_compiler():
        note(f"No C and C++ compiler found. If the build fails for it: {compiler_hint()}")
    pip: list[str | Path] = [python, "-m", "pip", "--no-input", "--disable-pip-version-check", "install"]
    pip.append("--no-deps")  # the lock names everything; `pip check` in scripts/test.py holds it to that
    run_logged([*pip, "-r", requirements], log, "Installing the dependencies failed.")
    # Its build tools are among the locked packages, so this step needs no network.
    run_logged([*pip, "--no-build-isolation", "--no-index", "-e", ROOT], log, "Installing localspec failed.")
    _stamp(folder, lock).write_text(wanted, "utf-8")
    return python


def make_environment(folder: Path, python: Path) -> None:
    """Create the virtual environment, or complete one that was left half-made.

    Raises SetupError if ``folder`` holds something else, or an environment that cannot be used.
    """
    if folder.exists() and not folder.is_dir():
        raise SetupError(f"{folder} is a file: remove it, or set LOCALSPEC_VENV to another place.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise SetupError(f"{folder} is not a virtual environment: set LOCALSPEC_VENV to another place.")
    usable = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    if _succeeds(python, usable):
        return
    command = [sys.executable, "-m", "venv", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0 or not _succeeds(python, usable):
        if "ensurepip" in made.stdout + made.stderr:
            raise SetupError(
                "This Python cannot make virtual environments with pip in them "
                f"(Debian, Ubuntu: sudo apt install python3-venv): {sys.executable}"
            )
        reason = (made.stderr or made.stdout).strip() or "its Python is older than 3.11, or does not start"
        raise SetupError(
            f"{folder} cannot be used: {reason}\nRemove it, or set LOCALSPEC_VENV to another place."
        )


def _succeeds(python: Path, code: str) -> bool:
    if not python.exists():
        return False
    return subprocess.run([str(python), "-I", "-c", code], capture_output=True, check=False).returncode == 0


def fingerprint() -> str:
    """A hash of everything that decides what the environment holds."""
    digest = hashlib.sha256(str(ROOT).encode())
    for name in ("pyproject.toml", "models.toml", "requirements/runtime.txt", "requirements/dev.txt"):
        path = ROOT / name
        digest.update(path.read_bytes() if path.exists() else b"-")
    return digest.hexdigest()


def is_current(folder: Path, lock: Lock, wanted: str) -> bool:
    """Whether the last set-up that completed covers ``lock`` (the development lock holds the runtime one)."""
    stamps = [_stamp(folder, "dev")] + ([_stamp(folder, "runtime")] if lock == "runtime" else [])
    return any(stamp.is_file() and stamp.read_text("utf-8") == wanted for stamp in stamps)


def _stamp(folder: Path, lock: Lock) -> Path:
    return folder / f"localspec-{lock}.stamp"
