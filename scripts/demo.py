#!/usr/bin/env python3
"""Set up everything on a fresh machine, then generate once without and once with speculation.

    python3 scripts/demo.py

Makes a virtual environment (.venv in the checkout, or where LOCALSPEC_VENV points), installs the locked
versions, fetches the default pair of models and prints what it measured. A second run skips what is done.
"""

import sys

# This file has to be readable by the interpreter it turns away, so it holds no newer syntax than this test.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("localspec needs Python 3.11 or newer; this is %d.%d (%s)" % (sys.version_info[:2] + (sys.executable,)))  # noqa: UP031, RUF005, E501

import _environment as environment


def main():
    # type: () -> int
    """Set up, fetch, measure; returns the exit code."""
    python = environment.prepare("runtime")
    environment.say("The default pair of models (1.6 GB, fetched once)")
    if environment.run([python, "-m", "localspec", "models", "pull"]) != 0:
        raise environment.SetupError("The models could not be fetched; run this again to resume.")
    environment.say("One prompt, without and with speculation")
    return environment.run([python, environment.ROOT / "scripts" / "_demo_main.py"])


if __name__ == "__main__":
    sys.exit(environment.guarded(main))
