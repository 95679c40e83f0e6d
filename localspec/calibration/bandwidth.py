"""Whether a model waits for memory or for arithmetic: bytes a pass reads, against what the memory can deliver."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np

from localspec.backend.gguf import read_gguf
from localspec.errors import InvalidOptionError

__all__ = ["Bandwidth", "bytes_per_pass", "measure_memory_read"]

_BUFFER_BYTES = 256 << 20  # several times the caches of common processors
_TRIALS = 5
_MEMORY_BOUND_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """How fast a pass over one token reads weights.

    Attributes:
        pass_bytes: weights that one pass reads.
        pass_s: seconds it takes.
        memory_bytes_per_s: what plain reading reaches with the same number of threads.
    """

    pass_bytes: int
    pass_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.pass_bytes > 0 and self.pass_s > 0 and self.memory_bytes_per_s > 0):
            raise InvalidOptionError(
                f"{self.pass_bytes} bytes in {self.pass_s} s of {self.memory_bytes_per_s} bytes/s; all are above 0"
            )

    @property
    def bytes_per_s(self) -> float:
        """Bytes of weights per second of the pass."""
        return self.pass_bytes / self.pass_s

    @property
    def share(self) -> float:
        """The pass's part of what plain reading reaches; above 1 where plain reading was not at its best."""
        return self.bytes_per_s / self.memory_bytes_per_s

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """What the pass waits for: "memory" from six tenths of the reading speed on, else "compute".

        A pass bound by memory has arithmetic to spare, so that verifying several tokens costs little more than one.
        """
        return "memory" if self.share >= _MEMORY_BOUND_SHARE else "compute"


def bytes_per_pass(path: Path) -> int:
    """Return the bytes of weights that a pass over one token reads.

    These are all tensors, but of a mixture of experts only the ones that a token is sent to, and no embedding table
    (of which one row is read) unless it is the output head as well.

    Raises:
        InvalidModelFileError: the file is damaged.
    """
    file = read_gguf(path)
    names = {tensor.name for tensor in file.tensors}
    architecture = file.metadata.get("general.architecture")
    used, experts = (file.metadata.get(f"{architecture}.{key}") for key in ("expert_used_count", "expert_count"))
    share = used / experts if isinstance(used, int) and isinstance(experts, int) and experts >= used > 0 else 1.0
    total = 0.0
    for tensor in file.tensors:
        if tensor.name == "token_embd.weight" and "output.weight" in names:
            continue
        total += tensor.data_bytes * (share if "_exps." in tensor.name else 1.0)
    return round(total)


def measure_memory_read(threads: int, *, buffer_bytes: int = _BUFFER_BYTES) -> float:
    """Return the bytes per second that ``threads`` threads together read from memory.

    Each looks for the maximum of its part of a buffer much larger than the caches, several times over; the best of
    them counts, because whatever disturbs a reading only makes it slower.
    """
    if threads < 1 or buffer_bytes < 8 * threads:
        raise InvalidOptionError(
            f"reading {buffer_bytes} bytes with {threads} threads; use a thread and 8 bytes for it"
        )
    parts = np.array_split(np.ones(buffer_bytes // 8), threads)
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(_TRIALS + 1):  # the first one starts the threads
            started = perf_counter()
            # A maximum keeps up with memory where a sum waits for its additions, and releases the interpreter lock.
            list(pool.map(np.max, parts))
            times.append(perf_counter() - started)
    return sum(part.nbytes for part in parts) / min(times[1:])
