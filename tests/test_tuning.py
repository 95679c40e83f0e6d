"""From a profile to a policy: what is recommended follows from the measured numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localspec import tuning
from localspec.adaptive import AdaptivePolicy
from localspec.calibration.profiles import predictor
from localspec.plans import EvaluationPlan
from localspec.policy import FixedPolicy
from localspec.profile import Estimate, KindAgreement, Profile, SamplerCost, best, save
from localspec.sampling import SamplingParams
from localspec.tuning import (
    DrafterName,
    GuessedCosts,
    RoughProfile,
    look_up_profile,
    measure_roughly,
    policy_for,
    profile_key,
    remembered_backend,
)
from tests.fakes import FakeContext, MarkovModel
from tests.test_profile import estimates, flat, profile

SAMPLED = SamplingParams(temperature=0.7)


def agreeing(tokens_per_step: list[float], kind: str = "all", temperature: float = 0.7) -> KindAgreement:
    values = estimates(tokens_per_step)
    return KindAgreement(kind, temperature, 900, 8, Estimate(0.8, 0.7, 0.9), values, values, (1.0, 0.8))


def with_costs(target: dict[int, float], draft: dict[int, float], *agreements: KindAgreement) -> Profile:
    return replace(profile(), target=flat(target), draft=flat(draft), agreement=agreements)


CHEAP = {1: 1.0, 2: 1.05, 3: 1.1}
DEAR = {1: 1.0, 2: 1.9, 3: 2.7}


def test_dear_verification_is_left_alone() -> None:
    policy = policy_for(with_costs(DEAR, {1: 0.5, 2: 0.9}, agreeing([1.0, 1.8, 2.4])), SAMPLED)
    assert isinstance(policy, AdaptivePolicy)
    assert not policy.worthwhile
    assert policy.plan(10).limit == 0


def test_cheap_verification_is_used() -> None:
    policy = policy_for(with_costs(CHEAP, {1: 0.1, 2: 0.2}, agreeing([1.0, 1.8, 2.4])), SAMPLED)
    assert isinstance(policy, AdaptivePolicy)
    assert policy.worthwhile


@pytest.mark.parametrize(("gain", "worth"), [(1.01, False), (1.03, True)])
def test_the_threshold_of_verdicts_is_that_of_every_policy(gain: float, worth: bool) -> None:
    agreed = agreeing([1.0, 1.8])
    draft_s = 0.1 + 0.8 * 0.1  # catching up is charged where all was accepted
    found = replace(with_costs({1: 1.0, 2: 1.8 / gain - draft_s}, {1: 0.1, 2: 0.2}, agreed), sampler=SamplerCost())
    found = replace(found, target_plan=EvaluationPlan(), draft_plan=EvaluationPlan())
    speedups = predictor(found)(agreed.tokens_per_step())
    assert max(speedups) == pytest.approx(gain)
    assert bool(best(speedups)) is worth
    assert policy_for(found, SAMPLED, name="calibrated") == FixedPolicy(int(worth))
    adaptive = policy_for(found, SAMPLED)
    assert isinstance(adaptive, AdaptivePolicy)
    assert adaptive.worthwhile is worth


def test_one_kind_that_gains_is_reason_enough() -> None:
    kinds = (agreeing([1.0, 1.05, 1.1], "prose"), agreeing([1.0, 1.9, 2.7], "code"), agreeing([1.0, 1.1, 1.2]))
    policy = policy_for(with_costs({1: 1.0, 2: 1.3, 3: 1.6}, {1: 0.1, 2: 0.2}, *kinds), SAMPLED)
    assert isinstance(policy, AdaptivePolicy)
    assert policy.worthwhile


@pytest.mark.parametrize(("target", "length"), [(CHEAP, 2), (DEAR, 0)])
def test_calibrated_takes_the_best_length_of_all_kinds(target: dict[int, float], length: int) -> None:
    profile = with_costs(target, {1: 0.1, 2: 0.2}, agreeing([1.0, 1.2, 1.3], "prose"), agreeing([1.0, 1.8, 2.4]))
    assert policy_for(profile, SAMPLED, name="calibrated") == FixedPolicy(length)


def test_the_nearest_temperature_counts() -> None:
    profile = with_costs(
        CHEAP,
        {1: 0.1, 2: 0.2},
        agreeing([1.0, 1.0, 1.0], temperature=0.0),
        agreeing([1.0, 1.8, 2.4], temperature=1.0),
    )
    assert policy_for(profile, SamplingParams(temperature=0.2), name="calibrated") == FixedPolicy(0)
    assert policy_for(profile, SamplingParams(temperature=0.9), name="calibrated") == FixedPolicy(2)


def test_a_rough_measurement_leaves_the_contexts_empty() -> None:
    target, draft = (FakeContext(MarkovModel([[0.5, 0.5], [0.5, 0.5]]), capacity=32) for _ in range(2))
    rough = measure_roughly(target, draft)
    assert target.length(0) == draft.length(0) == 0
    assert rough.target.sizes == (1, 2, 4, 8, 16)
    assert rough.draft.sizes == (1, 2)
    policy = policy_for(rough, SAMPLED)
    assert isinstance(policy, AdaptivePolicy)
    assert (policy.costs.max_draft_tokens, policy.costs.max_lookup_tokens) == (8, 15)


def test_a_rough_measurement_fits_a_tiny_context() -> None:
    target, draft = (FakeContext(MarkovModel([[0.5, 0.5], [0.5, 0.5]]), capacity=3) for _ in range(2))
    assert measure_roughly(target, draft).target.sizes == (1, 2)


def test_a_rough_profile_knows_no_best_length_beforehand() -> None:
    rough = RoughProfile(flat(CHEAP), flat({1: 0.1, 2: 0.2}))
    assert isinstance(policy_for(rough, SAMPLED), AdaptivePolicy)


@pytest.mark.parametrize("drafter", ["auto", "model", "lookup"])
def test_where_drafts_may_come_from(drafter: DrafterName) -> None:
    """Lookup needs no draft that pays: where the model does not, what the text repeats still may."""
    good, dear = (
        with_costs(costs, {1: 0.1, 2: 0.2}, agreeing([1.0, 1.8, 2.4])) for costs in (CHEAP, {1: 1.0, 2: 3.0, 3: 5.0})
    )
    rough = RoughProfile(flat(CHEAP), flat({1: 0.1, 2: 0.2}))
    for source, model_pays in ((good, True), (dear, False), (rough, True), (None, False)):
        policy = policy_for(source, SAMPLED, drafter=drafter)
        assert isinstance(policy, AdaptivePolicy)
        assert policy.worthwhile == (model_pays and drafter != "lookup")
        assert policy.lookup == (drafter != "model")
    assert isinstance(policy_for(None, SAMPLED).costs, GuessedCosts)  # type: ignore[attr-defined]


def test_profiles_are_found_by_what_they_were_measured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path / "cache"))
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    target.write_bytes(b"weights" * 1000)
    draft.write_bytes(b"weights" * 100)
    missing = look_up_profile(target, draft, threads=2)
    assert missing.profile is None
    assert "localspec calibrate" in (missing.problem or "")
    key = profile_key(target, draft, threads=2)
    save(tuning.profile_directory(), profile(key))
    assert look_up_profile(target, draft, threads=2).profile == profile(key)
    # Another processor, another file under the same name: refused, with the reason.
    monkeypatch.setattr(tuning, "cpu_name", lambda: "Another CPU")
    refused = look_up_profile(target, draft, threads=2)
    assert refused.profile is None
    assert "Another CPU" in (refused.problem or "")
    monkeypatch.undo()
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path / "cache"))
    target.write_bytes(b"Weights" * 1000)
    assert look_up_profile(target, draft, threads=2).profile is None


def test_the_backend_with_the_fastest_profile_at_hand_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALSPEC_CACHE_DIR", str(tmp_path / "cache"))
    target, draft, other = (tmp_path / name for name in ("target.gguf", "draft.gguf", "other.gguf"))
    for i, path in enumerate((target, draft, other), start=1):
        path.write_bytes(b"weights" * 100 * i)
    identities: dict[str, str | None] = {"llamacpp": "llama-cpp-python 1,", "ik": "ik_llama.cpp abc,"}
    monkeypatch.setattr(tuning, "identity_at_hand", identities.__getitem__)
    assert remembered_backend(target, draft, threads=2) is None

    def keep(backend: str, build: str, plain: float, gain: float) -> None:
        key = replace(profile_key(target, draft, threads=2), backend=backend, build=build)
        one = replace(profile(key), plain_tokens_per_s=plain)
        verdicts = tuple(replace(v, best_num_draft_tokens=1, predicted_speedup=(1.0, gain)) for v in one.verdicts)
        assert verdicts
        save(tuning.profile_directory(), replace(one, verdicts=verdicts))

    keep("llama.cpp", "llama-cpp-python 1, AVX2", 40.0, 1.0)
    assert remembered_backend(target, draft, threads=2) == "llamacpp"
    keep("ik_llama.cpp", "ik_llama.cpp abc, AVX2", 38.0, 1.3)
    assert remembered_backend(target, draft, threads=2) == "ik"
    # Plain decoding, other threads, files without a profile; a library that is gone or another one.
    assert remembered_backend(target, None, threads=2) == "llamacpp"
    assert remembered_backend(target, draft, threads=1) is None
    assert remembered_backend(target, other, threads=2) is None
    for identity in (None, "ik_llama.cpp def,"):
        identities["ik"] = identity
        assert remembered_backend(target, draft, threads=2) == "llamacpp"
    (tuning.profile_directory() / "broken.json").write_text("{")
    assert remembered_backend(target, draft, threads=2) == "llamacpp"
