"""What tells model files and machines apart."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path

__all__ = ["cpu_name", "file_fingerprint"]

_HEADER_BYTES = 1 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 4096


def file_fingerprint(path: Path) -> str:
    """Return what tells a model file from any other, in milliseconds and whatever name it goes by.

    It is a hash, in hex, of the size, the first MiB (the metadata) and 256 samples of 4 KiB spread evenly over the
    file, which change with every quantisation and with any training of the weights. It guards against mistakes, not
    against malice.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(_HEADER_BYTES))
        for i in range(1, _SAMPLES + 1):
            file.seek(max(0, size * i // _SAMPLES - _SAMPLE_BYTES))  # the last one ends with the file
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def cpu_name() -> str:
    """Return the processor's name, as far as the system tells."""
    system = platform.system()
    try:
        if system == "Linux":
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return " ".join(value.split())
        if system == "Darwin":
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass  # the general name is worse, and still a name
    return platform.processor() or platform.machine()
