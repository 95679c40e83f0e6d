"""The line that follows an answer; no model."""

from types import SimpleNamespace

import pytest

from localspec.adaptive import UNCALIBRATED, AdaptivePolicy
from localspec.cli.running import status_line, why_plain
from localspec.generation import Stats
from localspec.guard import Guard
from localspec.policy import FixedPolicy, StepOutcome

COSTS = SimpleNamespace(
    max_draft_tokens=4, max_lookup_tokens=4, verify_s=lambda n, _depth: float(n), draft_s=lambda _n, _depth: 1.0
)


def losing():
    guard = Guard()
    plain = StepOutcome(0, 0, 1, 0, 0.0, 1.0, 0.0)
    lost = StepOutcome(4, 0, 1, 0, 4.0, 5.0, 0.0)
    for outcome in (plain, plain, *[lost] * 8):
        guard.observe(outcome, 1.0, 9.0, speculated=outcome is lost)
    return guard


def losing_copies():
    policy = AdaptivePolicy(COSTS, UNCALIBRATED, worthwhile=False, lookup=True)
    policy.lookup_guard = losing()
    return policy


LOADED = object()


@pytest.mark.parametrize(
    ("policy", "draft", "drafter", "steps", "why"),
    [
        (FixedPolicy(0), None, "model", 20, "no draft model"),
        (FixedPolicy(0), LOADED, "auto", 20, "γ is 0"),
        (FixedPolicy(4), LOADED, "auto", 1, "too short to try"),
        (FixedPolicy(0, 4), None, "lookup", 20, "nothing worth copying"),
        (
            AdaptivePolicy(COSTS, UNCALIBRATED, worthwhile=False, lookup=True),
            LOADED,
            "lookup",
            20,
            "nothing worth copying",
        ),
        (losing_copies(), None, "lookup", 20, "copying lost time and rests"),
        (AdaptivePolicy(COSTS, UNCALIBRATED), LOADED, "auto", 3, "too short to try"),
        (AdaptivePolicy(COSTS, UNCALIBRATED, worthwhile=False), LOADED, "auto", 3, "says the profile"),
        (AdaptivePolicy(COSTS, UNCALIBRATED, guard=losing()), LOADED, "model", 20, "lost time"),
        (AdaptivePolicy(COSTS, UNCALIBRATED), LOADED, "auto", 20, "measured costs"),
    ],
)
def test_it_says_why_nothing_was_drafted(policy, draft, drafter, steps, why):
    can_draft = draft is not None or drafter != "model"
    session = SimpleNamespace(pair=SimpleNamespace(draft=draft), drafter=drafter, can_draft=can_draft)
    reason = why_plain(session, policy, steps)
    assert why in reason
    assert f"nothing drafted ({reason})" in status_line(Stats(tokens=steps, steps=steps), why=reason)


def test_it_gives_no_reason_where_there_were_drafts():
    stats = Stats(tokens=9, steps=3, drafted=8, accepted=6)
    assert "nothing" not in status_line(stats, num_draft_tokens=4, why="γ is 0")
