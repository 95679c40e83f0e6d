"""Tests of samples against exact laws. Seeds are fixed, so a test either always passes or always fails; the
false-alarm probability each test states is over the choice of its seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from scipy.stats import chi2


def g_test(outcomes: Iterable[Hashable], law: Mapping[Hashable, float]) -> float:
    """Return the p-value of ``outcomes`` under ``law``: the chance of a G statistic as large as theirs.

    Cells with an expectation below 5 are merged. An outcome of probability 0 gives 0.
    """
    counts = Counter(outcomes)
    if any(law.get(outcome, 0.0) <= 0 for outcome in counts):
        return 0.0
    size = counts.total()
    cells, small = [], np.zeros(2)
    for outcome, prob in law.items():
        cell = np.array([counts[outcome], size * prob])
        if cell[1] < 5:
            small += cell
        else:
            cells.append(cell)
    if small[1] >= 5:
        cells.append(small)
    elif small[1] > 0:
        cells[-1] = cells[-1] + small
    observed, expected = np.array(cells).T
    seen = observed > 0
    statistic = 2.0 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
    return float(chi2.sf(statistic, len(cells) - 1))


def holm_rejects(p_values: Mapping[str, float], size: float) -> list[str]:
    """Return the names rejected by Holm's procedure: the chance of any false rejection is at most ``size``."""
    ordered: Sequence[tuple[str, float]] = sorted(p_values.items(), key=lambda item: item[1])
    rejected = []
    for rank, (name, p_value) in enumerate(ordered):
        if p_value > size / (len(ordered) - rank):
            break
        rejected.append(name)
    return rejected
