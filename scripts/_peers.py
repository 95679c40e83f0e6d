"""The programs that scripts/bench_peers.py compares, each in a process of its own, all asked in the same way.

Every side gets token ids, answers token by token, and is timed by the same clock: this process's, from the moment
before the request is sent until a token has arrived. A process lives for one turn and is warmed up first.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

SCRIPTS = Path(__file__).resolve().parent
START_TIMEOUT_S = 120.0

# llama.cpp's defaults, said to every side so that none follows another one's.
SAMPLING = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}


class PeerError(Exception):
    """A side could not be started, or did not answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request.

    Attributes:
        text: what the user asks.
        prompt: the token ids of it in the target's chat template.
        temperature: 0 is greedy.
        max_tokens: of the answer.
        seed: of the draws.
        num_draft_tokens: for a side that takes it with the request; None leaves it to the side.
    """

    text: str
    prompt: Sequence[int]
    temperature: float
    max_tokens: int
    seed: int
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request took.

    Attributes:
        tokens: how many were emitted.
        first_s: until the first arrived.
        total_s: until the last arrived.
        steps: target passes that emitted something, where the side tells.
    """

    tokens: int
    first_s: float
    total_s: float
    steps: int | None

    @property
    def tokens_per_s(self) -> float:
        """End to end: reading the prompt included."""
        return self.tokens / self.total_s

    @property
    def decoded_per_s(self) -> float:
        """After the first token; a draft that reads the prompt only then pays for it here."""
        return (self.tokens - 1) / (self.total_s - self.first_s)


class Peer(Protocol):
    """A running side."""

    process: subprocess.Popen[Any]

    def ask(self, job: Job) -> Answer:
        """Answer one request, with nothing left in the caches from the one before."""

    def close(self) -> None:
        """End the process."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a process, in bytes: the most that was resident since its start, loading included, and at the end."""

    peak_bytes: int
    resident_bytes: int


def memory(process: subprocess.Popen[Any]) -> Memory:
    """Return what a process takes; where the system does not tell the peak, it is what is resident now."""
    resident = psutil.Process(process.pid).memory_info().rss
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return Memory(resident, resident)
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return Memory(int(peak.split()[1]) * 1024, resident)


class Worker:
    """A process that takes requests on standard input and writes a line for each token; see ``_peer_worker.py``.

    Args:
        command: what to run; it writes a line when it is ready.
        folder: where to run it.
    """

    def __init__(self, command: Sequence[str | Path], folder: Path | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=folder,
        )
        self._name = Path(str(command[1])).name
        self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(f"{self._name} ended: {_last_words(self.process, self._log)}")
        return json.loads(line)

    def _send(self, request: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a message in the target's chat template; localspec's worker only."""
        self._send({"encode": text})
        return list(self._line()["prompt"])

    def ask(self, job: Job) -> Answer:
        started = time.perf_counter()
        self._send(asdict(job) | SAMPLING)
        times = []
        while "done" not in (line := self._line()):
            times.append(time.perf_counter() - started)
        return Answer(len(times), times[0], times[-1], line["steps"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        _end(self.process, self._log)


class LlamaServer:
    """A llama-server on a port of its own, with one slot and no cache between requests.

    Args:
        program: its path.
        arguments: models, threads, drafting.
    """

    def __init__(self, program: str, arguments: Sequence[str | Path]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        # One slot, and nothing kept for later requests: neither time nor memory spent on what is not asked for.
        always = ["--parallel", "1", "--no-cache-prompt", "--cache-ram", "0", "--host", "127.0.0.1"]
        self.process = subprocess.Popen(
            [program, *map(str, arguments), *always, "--port", str(self._port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise PeerError(f"llama-server ended: {_last_words(self.process, self._log)}")
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)) as connection:
                    connection.request("GET", "/health")
                    if connection.getresponse().status == http.client.OK:
                        return
            except OSError:
                pass
            time.sleep(0.1)
        self.process.terminate()
        raise PeerError(
            f"llama-server was not ready after {START_TIMEOUT_S:.0f} s: {_last_words(self.process, self._log)}"
        )

    def ask(self, job: Job) -> Answer:
        wanted = {
            "prompt": list(job.prompt),
            "n_predict": job.max_tokens,
            "temperature": job.temperature,
            "seed": job.seed,
            "repeat_penalty": 1.0,
            "cache_prompt": False,
            "stream": True,
            **SAMPLING,
        }
        times, last = list[float](), dict[str, Any]()
        started = time.perf_counter()
        with closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            connection.request("POST", "/completion", json.dumps(wanted), {"Content-Type": "application/json"})
            for last in _events(connection.getresponse()):
                if last.get("tokens"):
                    times.append(time.perf_counter() - started)
        timings = last.get("timings")
        if timings is None:
            raise PeerError(f"llama-server did not finish: {json.dumps(last)[:300]}")
        count = int(timings["predicted_n"])
        # Each pass emits one token beyond those of the draft that it accepts.
        return Answer(count, times[0], times[-1], count - int(timings.get("draft_n_accepted", 0)))

    def close(self) -> None:
        self.process.terminate()
        _end(self.process, self._log)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    if response.status != http.client.OK:
        raise PeerError(f"llama-server answered {response.status}: {response.read(300)!r}")
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[len(b"data: ") :])


def _last_words(process: subprocess.Popen[Any], log: IO[bytes]) -> str:
    """End a process that failed; the last lines of its log, in one."""
    return " | ".join(_end(process, log).splitlines()[-6:])


def _end(process: subprocess.Popen[Any], log: IO[bytes]) -> str:
    """Wait for a process that was told to end; its log."""
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    with log:
        log.seek(0)
        return log.read().decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts the sides on one pair of files.

    Attributes:
        target: the target's file.
        draft: the draft's.
        threads: threads per pass.
        context: tokens of context.
    """

    target: Path
    draft: Path
    threads: int
    context: int

    def localspec(self, *, speculative: bool, backend: str = "llamacpp", draft: Path | None = None) -> Worker:
        """Return localspec's own session; ``draft`` is one in place of the pair's."""
        return self._python(f"localspec-{backend}", draft=(draft or self.draft) if speculative else None)

    def llama_cpp_python(self, *, lookup: bool) -> Worker:
        """Return llama-cpp-python's ``Llama``, plain or with its prompt-lookup draft."""
        return self._python("llama-cpp-python-lookup" if lookup else "llama-cpp-python", draft=None)

    def _python(self, kind: str, *, draft: Path | None) -> Worker:
        files = [self.target, draft] if draft else [self.target]
        command: list[str | Path] = [
            sys.executable,
            SCRIPTS / "_peer_worker.py",
            kind,
            str(self.threads),
            str(self.context),
            *files,
        ]
        return Worker(command)

    def node(self, program: str, folder: str, *, least_drafted: int | None = None) -> Worker:
        """Return node-llama-cpp, plain or with its DraftSequenceTokenPredictor.

        Args:
            program: node.
            folder: where the package is.
            least_drafted: tokens that a step waits for, 0 by default of the package; None is plain.
        """
        drafting: list[str | Path] = [] if least_drafted is None else [self.draft, str(least_drafted)]
        command: list[str | Path] = [
            program,
            SCRIPTS / "_peer_worker.mjs",
            str(self.threads),
            str(self.context),
            self.target,
            *drafting,
        ]
        return Worker(command, Path(folder))

    def llama_server(
        self, program: str, *, draft_tokens: int | None = None, sampling: str = "greedy", surety: float = 0.0
    ) -> LlamaServer:
        """Return llama-server, plain or with a draft model.

        Args:
            program: its path.
            draft_tokens: the most to draft in a step; None is plain.
            sampling: how it draws drafts: "greedy" or "probabilistic".
            surety: it stops drafting where its likeliest token has less probability than this.
        """
        arguments: list[str | Path] = ["--model", self.target, "--ctx-size", str(self.context)]
        arguments += ["--threads", str(self.threads), "--threads-batch", str(self.threads)]
        if draft_tokens is not None:
            arguments += ["--spec-type", "draft-simple", "--model-draft", self.draft]
            arguments += ["--spec-draft-n-max", str(draft_tokens), "--spec-draft-sampling", sampling]
            arguments += ["--spec-draft-p-min", str(surety)]
        return LlamaServer(program, arguments)
