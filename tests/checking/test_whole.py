"""Laws over a whole vocabulary: sound ones pass, and broken sums, differences and draws are found."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from localspec.checking.findings import Allowance
from localspec.checking.rows import WholeRows
from localspec.checking.whole import whole_faults
from localspec.sampling import KeptIds, SamplingParams, SparseLaw, kept, laws, rules

SIZE = 3000
PARAMS = SamplingParams(temperature=0.8, top_k=40)


def whole(*, cut: bool = False, draft_size: int = SIZE) -> WholeRows:
    rng = np.random.default_rng(5)
    target = rng.normal(0, 3, (4, SIZE)).astype(np.float32)
    draft = (target[:3, :draft_size] + rng.normal(0, 1, (3, draft_size))).astype(np.float32)
    ids = None
    if cut:
        ids = KeptIds(np.arange(0, SIZE, 3), SIZE)
        draft[:, np.setdiff1d(np.arange(draft_size), ids.ids)] = -np.inf
    return WholeRows(target, draft, tuple(row[: draft_size // 2].argmax() for row in draft), ids)


def faults(rows: WholeRows, params: SamplingParams = PARAMS) -> list[str]:
    found = list(whole_faults([rows], params, Allowance(9.0, clock=itertools.count().__next__)))
    assert len(found) > 10
    return [fault for fault in found if fault]


@pytest.mark.parametrize("rows", [whole(), whole(cut=True), whole(draft_size=SIZE - 100)], ids=["all", "cut", "less"])
@pytest.mark.parametrize(
    "params",
    [PARAMS, SamplingParams(temperature=1.3, top_p=0.9), SamplingParams(temperature=1e-3, logit_bias={7: 2.0})],
    ids=["top-k", "top-p", "cold"],
)
def test_sound_laws_pass(rows: WholeRows, params: SamplingParams) -> None:
    assert faults(rows, params) == []


def chunk_missed(self: laws.DenseLaw, uniform: float) -> int:
    edges = np.cumsum(self.weights, dtype=np.float64)
    return int(np.searchsorted(edges, uniform * edges[-1])) % 2048


def likeliest_wins(self: laws.DenseLaw, noise: Any) -> int:
    return int(self.weights.argmax())


@pytest.mark.parametrize(
    ("name", "broken"), [("draw", chunk_missed), ("race", likeliest_wins), ("prob", lambda self, token: 0.5)]
)
def test_a_broken_dense_law_is_found(name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws.DenseLaw, name, broken)
    assert faults(whole())


@pytest.mark.parametrize("cut", [False, True])
def test_a_broken_difference_is_found(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of a dense law and a sparse one, as of a copy or of a draft with a cut vocabulary."""
    original = laws.residual

    def wrong(p: Any, q: Any, scale: float = 1.0) -> Any:
        if isinstance(p, laws.DenseLaw) and isinstance(q, SparseLaw):
            q = SparseLaw(q.ids, q.probs * 0)
        return original(p, q, scale)

    monkeypatch.setattr(rules, "residual", wrong)
    assert faults(whole(cut=cut))


def test_laws_over_kept_ids_that_are_no_laws_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kept.KeptIds.make_law

    def unscaled(self: Any, *arguments: Any) -> Any:
        law = original(self, *arguments)
        return SparseLaw(law.ids, law.probs * 1.5)

    def elsewhere(self: Any, *arguments: Any) -> Any:
        law = original(self, *arguments)
        return dataclasses.replace(law, ids=np.searchsorted(self.ids, law.ids))

    for broken in (unscaled, elsewhere):
        monkeypatch.setattr(kept.KeptIds, "make_law", broken)
        assert any("off what its logits say" in fault for fault in faults(whole(cut=True)))
