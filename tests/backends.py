"""The backend that tests on real models run with: llama.cpp, or what ``LOCALSPEC_TEST_BACKEND`` names.

A process can use one backend only. tests/backend/test_ik.py runs the same tests once more in processes of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from localspec.backend.choice import BackendName, load_binding
from localspec.backend.native import NativeModel

VARIABLE = "LOCALSPEC_TEST_BACKEND"
BACKEND = cast(BackendName, os.environ.get(VARIABLE, "llamacpp"))


def open_model(path: Path) -> NativeModel:
    """Load a model with the backend under test."""
    return NativeModel(path, load_binding(BACKEND))


def close(left: NDArray[np.float32], right: NDArray[np.float32]) -> bool:
    """Whether rows are the same but for kernels, which differ with the size of a pass.

    On a row's standard deviation as the unit, that noise was measured at up to 0.09, and at 0.45 and more what rows
    after other tokens differ by (root mean squares).
    """
    assert left.shape == right.shape
    error = np.sqrt(((left - right) ** 2).mean(axis=-1))
    return bool((error < 0.15 * right.std(axis=-1)).all())
