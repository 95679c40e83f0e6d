"""A batch on a pool without models, for tests that kill it: ``driver.py PROMPTS OUTPUT ORDER``."""

import sys
from pathlib import Path

from tests.batch.fakes import FakePool, run

if __name__ == "__main__":
    print("started", flush=True)
    done = run(Path(sys.argv[1]), Path(sys.argv[2]), FakePool(order=int(sys.argv[3]), pause_s=0.002))
    sys.exit(0 if done.complete else 1)
