#!/usr/bin/env python3
"""Set up a development environment and run every check.

    python3 scripts/test.py            everything, the tests on real models included
    python3 scripts/test.py --fast     without the tests that need model files
    python3 scripts/test.py -k EXPR    only the tests that match, and no other check

Leaves with 1 if any check failed; all of them run either way. pytest's closing lines are printed last.
"""

import sys

# This file has to be readable by the interpreter it turns away, so it holds no newer syntax than this test.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("localspec needs Python 3.11 or newer; this is %d.%d (%s)" % (sys.version_info[:2] + (sys.executable,)))  # noqa: UP031, RUF005, E501

import _checks
import _environment as environment

if __name__ == "__main__":
    sys.exit(environment.guarded(_checks.main))
