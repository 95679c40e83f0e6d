"""A session on table-driven models, for checks that have no model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from localspec.calibration.prompts import CalibrationPrompt
from localspec.checking.findings import Finding, Report
from localspec.checking.runner import check
from localspec.checking.subject import CheckSettings
from localspec.sampling import SamplingParams
from localspec.session import Session
from localspec.tuning import ProfileLookup
from tests.fakes import FakeContext, MarkovModel

SIZE = 12
END = SIZE - 1
PROMPTS = tuple(CalibrationPrompt("letters", text) for text in ("abc", "deb", "gah", "cic", "fad"))
PARAMS = SamplingParams(temperature=0.8, top_k=6)


def models(seed: int = 3, *, agreement: float = 0.6) -> tuple[MarkovModel, MarkovModel]:
    """Return a target, and a draft that mixes it with another model; the end is rare."""
    target, other = (MarkovModel.random(s, SIZE, spread=1.5) for s in (seed, seed + 100))
    weights = target.laws * np.where(np.arange(SIZE) == END, 0.05, 1.0)
    laws = weights / weights.sum(-1, keepdims=True)
    return MarkovModel(laws), MarkovModel(agreement * laws + (1 - agreement) * other.laws)


def vocabulary() -> Any:
    return SimpleNamespace(
        size=SIZE,
        bos=None,
        adds_bos=False,
        tokenize=lambda text, control=False: [ord(letter) - ord("a") for letter in text],
        piece=lambda token: bytes([ord("a") + token]),
        ends_generation=lambda token: token == END,
    )


def session(target: Any, draft: Any) -> Session:
    target.model.vocabulary = vocabulary()
    target.model.path = Path("table.gguf")
    pair: Any = SimpleNamespace(
        target=target, draft=draft, profile=ProfileLookup(None, None), default_params=PARAMS, draft_header=None
    )
    return Session(pair, template=None)


def contexts(
    kind: Callable[..., FakeContext] = FakeContext, *, capacity: int = 128, agreement: float = 0.6, **options: Any
) -> tuple[FakeContext, FakeContext]:
    target, draft = models(agreement=agreement)
    return kind(target, capacity=capacity, chunk=16, **options), FakeContext(draft, capacity=capacity, chunk=16)


def settings(params: SamplingParams = PARAMS, *, budget_s: float = 4.0, seed: int = 0) -> CheckSettings:
    return CheckSettings(params=params, num_draft_tokens=3, budget_s=budget_s, seed=seed, prompts=PROMPTS)


def run(target: Any = None, draft: Any = None, **options: Any) -> Report:
    if target is None:
        target, draft = contexts()
    return check(session(target, draft), settings(**options))


def failed(report: Report) -> list[str]:
    return [finding.part for finding in report.findings if not finding.passed]


def shown(finding: Finding) -> str:
    return f"{finding.part}: {finding.summary} {finding.problems} {finding.elapsed_s:.2f} s"
