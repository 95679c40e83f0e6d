"""Record a chat with the default pair into docs/transcript.md.

    python scripts/record_chat.py [--check]

The session is real: the program runs, gets one line at a time, and what it prints is what the document shows, behind
the prompt that a terminal would show. It is greedy, so that the text comes out the same on each run; the speeds are
those of the machine it ran on. ``--check`` needs no model: it tells whether the document shows the script below.
"""

from __future__ import annotations

import argparse
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "transcript.md"

ARGUMENTS = ("--temperature", "0", "--max-tokens", "160")
SAID = (
    "Write a Python function that returns the n-th Fibonacci number. Code only.",
    "/gamma 4",
    "Rename its argument to `index` and add a docstring. Code only.",
    "/stats",
    "/draft off",
    "/retry",
    "/tokens def fibonacci(index):",
    "/gamma auto",
    "Why may it be slow for large numbers? One sentence.",
)

_QUIET_S = 1.0  # silence after which a command that prints nothing counts as done
_PATIENCE_S = 600.0


def main() -> int:
    """Record, or check; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/record_chat.py", description="Record a chat with the default pair."
    )
    parser.add_argument("--check", action="store_true", help="only tell whether the document shows this script")
    if parser.parse_args().check:
        text = DOCUMENT.read_text("utf-8") if DOCUMENT.exists() else ""
        if [line[2:] for line in text.splitlines() if line.startswith("> ")] == list(SAID) and _command() in text:
            return 0
        print(f"{DOCUMENT.relative_to(ROOT)} is out of date; run: python scripts/record_chat.py", file=sys.stderr)
        return 1
    DOCUMENT.write_text(_document(_record()), encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 0


def _command() -> str:
    return " ".join(("localspec chat", *ARGUMENTS))


def _document(session: str) -> str:
    return f"""# A session, as it was

Recorded by `scripts/record_chat.py`: a real run on the default pair at temperature 0. The speeds are those of the
machine it ran on; where drafting costs more than it saves, the last figure of a status line is below 1.

~~~~
$ {_command()}
{session.rstrip()}
~~~~
"""


def _record() -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "localspec", "chat", *ARGUMENTS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT) as child:
        assert child.stdin is not None
        shown = []
        for line in SAID:
            child.stdin.write(f"{line}\n".encode())
            child.stdin.flush()
            reply = _reply(child, answered=not line.startswith("/") or line == "/retry")
            shown.append(f"> {line}\n{reply.rstrip()}\n\n")
            print(shown[-1], end="", flush=True)
        child.stdin.close()
    if child.returncode:
        raise SystemExit(f"localspec chat left with {child.returncode}")
    return "".join(shown)


def _reply(child: subprocess.Popen[bytes], *, answered: bool) -> str:
    """Return what comes until the status line of an answer, or until a command has had its say."""
    assert child.stdout is not None
    reply = b""
    deadline = time.monotonic() + _PATIENCE_S
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if selector.select(_QUIET_S):
                chunk = os.read(child.stdout.fileno(), 65536)
                if not chunk:
                    break
                reply += chunk
            elif reply and (not answered or b" tokens/s" in reply.splitlines()[-1]):
                break
    return reply.decode()


if __name__ == "__main__":
    sys.exit(main())
