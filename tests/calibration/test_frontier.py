"""Rankings, frontiers and what bought what, from measurements whose every number is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from localspec.acceptance import Transcript
from localspec.backend.choice import BackendName
from localspec.calibration.agreement import Observation, ScoredText
from localspec.calibration.costs import Setting
from localspec.calibration.frontier import Candidate, Frontier, ModelFile, find_frontier, profiles_of
from localspec.calibration.frontier_report import as_values, render, save_frontier_picture, verdict
from localspec.calibration.search import Began, LeftOut, Measurements, PassesOf, SamplerOf, Written
from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.profile import WORTHWHILE, ProfileKey, SamplerCost
from localspec.theory import speedup

GIVEN, OTHER = Path("given.gguf"), Path("other.gguf")
WHOLE, SMALL, CUT = Path("whole.gguf"), Path("small.gguf"), Path("cut.gguf")
TARGETS = (ModelFile(GIVEN, "Q4_K_M", 1000 << 20), ModelFile(OTHER, "F16", 3000 << 20))
DRAFTS = (
    ModelFile(WHOLE, "Q8_0", 500 << 20),
    ModelFile(SMALL, "Q4_0", 300 << 20),
    ModelFile(CUT, "Q4_0 cut:32k", 200 << 20, uncut=SMALL, is_cut=True),
)
ALPHA = {WHOLE: 0.9, SMALL: 0.9, CUT: 0.85}
SIZES = (*range(1, 10), 12, 16)


def curves(one_s: float, slope: float, sizes: Sequence[int] = SIZES) -> CostCurves:
    """Passes of which every further token costs ``slope`` of the first."""
    points = tuple(PassCost(n, n, one_s * (1 + slope * (n - 1)), 1e-9, 9) for n in sizes)
    return CostCurves((CostCurve(256, points),))


def text(kind: str, *, draft_names: Sequence[Path], repeats: bool = False, temperature: float = 0.8) -> ScoredText:
    """A long text on which every draft is accepted as often as ``ALPHA`` says, everywhere alike."""
    length = 400
    prompt = tuple(range(1000, 1040))
    tokens = tuple((prompt * 10)[:length]) if repeats else tuple(range(length))
    ones = np.ones(length)
    observations = tuple(
        Observation(kind, 0, temperature, Transcript(ones, ones * ALPHA[path]), ones * ALPHA[path], ones, ones[:0])
        for path in draft_names
    )
    return ScoredText(kind, temperature, prompt, tokens, observations)


# Costs of one token, and of each further one: ik verifies at a fifth of llama.cpp's price.
TARGET_COSTS: dict[tuple[BackendName, Path], tuple[float, float]] = {
    ("llamacpp", GIVEN): (0.030, 0.6),
    ("llamacpp", OTHER): (0.080, 0.15),
    ("ik", GIVEN): (0.025, 0.12),
    ("ik", OTHER): (0.060, 0.05),
}
DRAFT_COSTS = {WHOLE: 0.012, SMALL: 0.008, CUT: 0.005}


def measurements(
    *, backends: Sequence[BackendName] = ("llamacpp", "ik"), kinds: Sequence[str] = ("prose",)
) -> Measurements:
    found = Measurements()
    for backend in backends:
        found.add(Began(backend, f"{backend} 1,", Setting(2, "off")))
        found.add(SamplerOf(backend, SamplerCost()))
        for (name, path), (one_s, slope) in TARGET_COSTS.items():
            if name == backend:
                found.add(PassesOf(backend, path, curves(one_s, slope)))
        for path, one_s in DRAFT_COSTS.items():
            found.add(PassesOf(backend, path, curves(one_s, 0.0, (1, 2, 3, 4)), curves(one_s, 0.5, (1, 4))))
    for target in (GIVEN, OTHER):
        for kind in kinds:
            found.add(Written(target, text(kind, draft_names=list(ALPHA), repeats=kind == "editing")))
    return found


def frontier(found: Measurements) -> Frontier:
    made = find_frontier(found, TARGETS, DRAFTS, temperature=0.8, max_draft_tokens=8)
    assert made is not None
    return made


def pick(made: Frontier, *names: object) -> Candidate:
    (found,) = (c for c in made.candidates if (c.backend, c.target, c.draft, c.drafter) == names)
    return found


def test_speeds_are_the_theory_s() -> None:
    made = frontier(measurements())
    for (backend, target), (one_s, slope) in TARGET_COSTS.items():
        assert pick(made, backend, target, None, "none").tokens_per_s == pytest.approx(1 / one_s)
        for draft, draft_s in DRAFT_COSTS.items():
            costs = [1 + slope * n for n in range(9)]
            gains = [speedup(ALPHA[draft], gamma, draft_s / one_s, costs) for gamma in range(9)]
            found = pick(made, backend, target, draft, "model")
            # The recursion ends with the text, 400 tokens long: hence not to the last digit.
            assert found.tokens_per_s == pytest.approx(max(gains[1:]) / one_s, rel=0.01)
            assert gains[found.how.num_draft_tokens] == pytest.approx(max(gains[1:]), rel=0.01)


def test_a_draft_that_loses_is_listed_as_it_is() -> None:
    found = measurements(backends=["llamacpp"])
    found.add(PassesOf("llamacpp", GIVEN, curves(0.030, 1.0)))
    made = frontier(found)
    assert made.best.drafter == "none"
    assert made.speedup(pick(made, "llamacpp", GIVEN, WHOLE, "model")) < 1
    assert made.changes(made.best) == []


def test_drafting_is_advised_where_a_profile_would_have_it_done() -> None:
    found = measurements(backends=["llamacpp"])
    speeds = []
    for draft_s, worthwhile in ((0.0185, False), (0.0179, True)):  # a gain of 1.5%, and of 2.3%
        slow = curves(draft_s, 0.0, (1, 2, 3, 4))
        for path in ALPHA:
            found.add(PassesOf("llamacpp", path, slow, slow))
        found.add(PassesOf("llamacpp", GIVEN, curves(0.030, 0.25)))
        made = find_frontier(found, TARGETS[:1], DRAFTS[:1], temperature=0.8, max_draft_tokens=8)
        assert made is not None
        drafting, plain = (pick(made, "llamacpp", GIVEN, d, how) for d, how in ((WHOLE, "model"), (None, "none")))
        speeds.append(made.speedup(drafting))
        assert made.candidates.index(drafting) < made.candidates.index(plain), "speeds are listed as they are"
        assert made.is_worthwhile(plain)
        assert made.is_worthwhile(drafting) is worthwhile
        assert made.is_efficient(drafting) is worthwhile
        assert made.is_efficient(plain)
        assert made.best == made.fastest == (drafting if worthwhile else plain)
        assert as_values(made)["candidates"][made.candidates.index(drafting)]["worthwhile"] is worthwhile
        assert ("without drafts" in verdict(made)) is not worthwhile
    assert 1 < speeds[0] < WORTHWHILE <= speeds[1]


def test_sorted_and_marked() -> None:
    made = frontier(measurements())
    speeds = [c.tokens_per_s for c in made.candidates]
    assert speeds == sorted(speeds, reverse=True)
    for number, candidate in enumerate(made.candidates):
        beaten = any(
            other.tokens_per_s >= candidate.tokens_per_s and other.memory_bytes <= candidate.memory_bytes
            for other in made.candidates[:number] + made.candidates[number + 1 :]
            if (other.tokens_per_s, other.memory_bytes) != (candidate.tokens_per_s, candidate.memory_bytes)
        )
        assert not (beaten and made.is_efficient(candidate))
        if not beaten and not made.is_efficient(candidate):  # an equal one stands before it
            assert candidate.tokens_per_s == made.candidates[number - 1].tokens_per_s
    assert made.is_efficient(made.candidates[0])
    # The smaller and cheaper of equally good drafts beats the other; nothing needs less memory than no draft.
    assert not made.is_efficient(pick(made, "ik", GIVEN, WHOLE, "model"))
    assert made.is_efficient(pick(made, "ik", GIVEN, None, "none"))
    assert not made.is_efficient(pick(made, "llamacpp", GIVEN, None, "none"))


def test_what_bought_what() -> None:
    made = frontier(measurements(kinds=["prose", "editing"]))
    assert (made.baseline.backend, made.baseline.target, made.baseline.drafter) == ("llamacpp", GIVEN, "none")
    best = made.best
    assert (best.backend, best.target, best.draft, best.drafter) == ("ik", GIVEN, CUT, "auto")
    changes = made.changes(best)
    assert [(c.factor, c.value) for c in changes] == [
        ("backend", "ik"),
        ("draft", "Q8_0"),
        ("draft", "Q4_0"),
        ("cut", "Q4_0 cut:32k"),
        ("drafter", "auto"),
    ]
    assert changes[0].ratio == pytest.approx(0.030 / 0.025)
    assert prod(c.ratio for c in changes) == pytest.approx(made.speedup(best))
    assert changes[-1].candidate is best


def test_another_target_is_a_change_too_and_never_the_advice() -> None:
    found = measurements()
    found.add(PassesOf("ik", OTHER, curves(0.015, 0.1)))  # as if it were faster than the given one
    made = frontier(found)
    assert made.fastest.target == OTHER
    assert made.best.target == GIVEN
    assert [c.factor for c in made.changes(made.fastest)][:2] == ["backend", "target"]
    report = render(made)
    assert "F16 is another model than Q4_K_M" in report
    assert "Fastest with Q4_K_M" in report.splitlines()[-2] + report.splitlines()[-1]
    assert not as_values(made)["fastest"]["given_target"]


def test_copying_wins_where_a_text_repeats_itself() -> None:
    made = frontier(measurements(backends=["ik"], kinds=["editing"]))
    lookup = pick(made, "ik", GIVEN, None, "lookup")
    assert lookup.how.num_copied == 15  # a pass of 16 costs 1 + 15 * 0.12, and all copies are right
    assert lookup.tokens_per_s == pytest.approx(16 / (0.025 * 2.8), rel=0.1)
    assert made.is_efficient(lookup)
    assert made.best.drafter == "auto"  # the model drafts at the beginning, before anything repeats itself
    plain = frontier(measurements(backends=["ik"], kinds=["prose"]))
    assert pick(plain, "ik", GIVEN, None, "lookup").tokens_per_s == pytest.approx(40)
    # As fast and as large: the simpler one comes first.
    ways = [c.drafter for c in plain.candidates if c.target == GIVEN and c.draft is None]
    assert ways == ["none", "lookup"]


def test_speeds_by_kind_are_those_of_the_texts() -> None:
    made = frontier(measurements(kinds=["prose", "editing"]))
    one = pick(made, "ik", GIVEN, None, "lookup")
    by_kind = dict(one.by_kind)
    assert by_kind["prose"] == pytest.approx(40)
    assert by_kind["editing"] > one.tokens_per_s > by_kind["prose"]
    harmonic = 2 / (1 / by_kind["prose"] + 1 / by_kind["editing"])  # texts of one length
    assert one.tokens_per_s == pytest.approx(harmonic, rel=1e-3)


def test_whatever_is_measured_is_compared() -> None:
    found = measurements()
    del found.of_drafts["ik", CUT], found.texts[OTHER]
    found.add(LeftOut("ik", CUT, "interrupted"))
    made = frontier(found)
    ways = {(c.backend, c.target, c.draft, c.drafter) for c in made.candidates}
    assert ("ik", GIVEN, CUT, "model") not in ways
    assert ("llamacpp", GIVEN, CUT, "model") in ways
    assert {way[3] for way in ways if way[1] == OTHER} == {"none"}
    del found.of_targets["llamacpp", GIVEN]
    assert frontier(found).baseline.backend == "ik"
    del found.of_targets["ik", GIVEN]
    assert find_frontier(found, TARGETS, DRAFTS, temperature=0.8, max_draft_tokens=8) is None


def test_a_target_may_draft_for_itself() -> None:
    found = measurements(backends=["ik"])
    own = (*DRAFTS[:2], ModelFile(GIVEN, "Q4_K_M", 1000 << 20))
    found.add(PassesOf("ik", GIVEN, curves(0.001, 0.0, (1, 2, 3, 4)), curves(0.001, 0.5, (1, 4))))
    made = find_frontier(found, TARGETS, own, temperature=0.8, max_draft_tokens=8)
    assert made is not None
    assert pick(made, "ik", GIVEN, None, "none").tokens_per_s == pytest.approx(40)
    assert made.speedup(pick(made, "ik", GIVEN, GIVEN, "model")) > 1.5
    renamed = replace(made, drafts=(*DRAFTS[:2], ModelFile(GIVEN, "given", 1000 << 20)))
    assert (renamed.target_label(GIVEN), renamed.draft_label(GIVEN)) == ("Q4_K_M", "given")


def test_texts_of_other_temperatures_do_not_count() -> None:
    found = measurements()
    found.add(Written(GIVEN, text("prose", draft_names=list(ALPHA), repeats=True, temperature=0.0)))
    assert frontier(found).candidates == frontier(measurements()).candidates


def test_every_measured_pair_gets_a_profile() -> None:
    found = measurements()
    del found.of_drafts["ik", CUT]

    def key(backend: BackendName, target: Path, draft: Path) -> ProfileKey:
        return ProfileKey(str(target), str(draft), "cpu", 2, found.began[backend].build, backend)

    made = list(profiles_of(found, TARGETS, DRAFTS, key=key, max_draft_tokens=8))
    assert len(made) == 2 * 2 * 3 - 2
    speeds = frontier(found)
    for backend, target, draft, profile, agreements in made:
        assert profile.key == key(backend, target, draft)
        assert agreements[-1].acceptance_rate == pytest.approx(ALPHA[draft])
        pooled = profile.verdicts[-1]
        candidate = pick(speeds, backend, target, draft, "model")
        predicted = pooled.predicted_speedup[candidate.how.num_draft_tokens] * profile.plain_tokens_per_s
        assert candidate.tokens_per_s == pytest.approx(predicted, rel=0.02)


def test_the_report_fits_a_terminal() -> None:
    report = render(frontier(measurements(kinds=["prose", "editing"])))
    assert max(map(len, report.splitlines())) <= 80
    lines = report.splitlines()
    (plain,) = (line for line in lines if " 1.00×" in line and "llamacpp" in line and "none" in line)
    assert " 33.3 " in plain
    assert "together" in report
    assert any(line.startswith("*") for line in lines)


def test_values_hold_every_candidate() -> None:
    made = frontier(measurements())
    values = as_values(made)
    assert len(values["candidates"]) == len(made.candidates) == 2 * 2 * (2 + 2 * 3)
    assert values["best"] in values["candidates"]
    assert values["baseline"]["speedup"] == 1
    assert {"factor", "value", "ratio", "tokens_per_s"} == values["best_changes"][0].keys()


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = frontier(measurements())
    save_frontier_picture(tmp_path / "p.svg", made)
    assert "<svg" in (tmp_path / "p.svg").read_text(encoding="utf-8")
