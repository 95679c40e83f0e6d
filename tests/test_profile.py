from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from localspec.confidence import ConfidenceModel
from localspec.curves import CostCurve, CostCurves, PassCost
from localspec.errors import InvalidOptionError, ProfileError, StoreError
from localspec.plans import EvaluationPlan
from localspec.profile import (
    ConfidenceAt,
    DraftTemperatureAt,
    Estimate,
    KindAgreement,
    Profile,
    ProfileKey,
    SamplerCost,
    Verdict,
    best,
    find,
    load,
    predicted_speedups,
    profile_path,
    save,
)
from localspec.theory import best_num_draft_tokens, speedup

KEY = ProfileKey(target="aa", draft="bb", cpu="Some CPU", threads=4, build="llama-cpp-python 1, AVX2")


def flat(seconds: dict[int, float], depth: int = 64) -> CostCurves:
    return CostCurves((CostCurve(depth, tuple(PassCost(n, n, s, 0.0, 5) for n, s in seconds.items())),))


def estimates(values: list[float]) -> tuple[Estimate, ...]:
    return tuple(Estimate(value, value - 0.1, value + 0.1) for value in values)


def profile(key: ProfileKey = KEY) -> Profile:
    return Profile(
        key=key,
        created="2025-01-31",
        target=flat({1: 0.03, 2: 0.045, 3: 0.06}),
        draft=flat({1: 0.01, 2: 0.03}),
        target_plan=EvaluationPlan(((1,), (2,), (3,))),
        draft_plan=EvaluationPlan(((1,), (1, 1))),
        sampler=SamplerCost(0.0003, 0.0005, 0.0004),
        threads=2,
        flash_attention="off",
        agreement=(
            KindAgreement(
                kind="code",
                temperature=0.7,
                num_tokens=900,
                num_prompts=8,
                acceptance_rate=Estimate(0.8, 0.75, 0.85),
                token=estimates([1.0, 1.8, 2.4]),
                block=estimates([1.0, 1.8, 2.45]),
                accepted_prefix=(1.0, 0.8, 0.6),
            ),
        ),
        confidence=(ConfidenceAt(0.7, ConfidenceModel((0.1, 0.5, 1.0), (0.2, 0.6, 0.9), (0.3, 0.8))),),
        draft_temperatures=(),
        plain_tokens_per_s=32.5,
        verdicts=(Verdict("code", 0.7, 1, (1.0, 1.2, 1.1)),),
    )


# On disk

DIFFERENCES = [
    ("target", "cc", "the target file is cc, and it was made for aa"),
    ("draft", "cc", "the draft file is cc, and it was made for bb"),
    ("cpu", "Other CPU", "the processor is Other CPU, and it was made for Some CPU"),
    ("threads", 8, "the number of threads is 8, and it was made for 4"),
    ("build", "newer", "the build of the backend is newer, and it was made for llama-cpp-python 1, AVX2"),
    ("backend", "other", "the backend is other, and it was made for llama.cpp"),
    ("flash_attention", "on", "flash attention is on, and it was made for auto"),
]


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path / "profiles", profile())
    assert load(path, KEY) == profile()
    assert find(tmp_path / "profiles", KEY) == profile()
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    other = replace(
        profile(), draft_temperatures=(DraftTemperatureAt(0.8, 0.7),), agreement=(), confidence=(), verdicts=()
    )
    assert save(tmp_path / "profiles", other) == path
    assert find(tmp_path / "profiles", KEY) == other
    assert (other.draft_temperature(0.8), other.draft_temperature(0.7)) == (0.7, None)


@pytest.mark.parametrize(("part", "value", "words"), DIFFERENCES)
def test_each_part_of_the_key_is_compared(tmp_path: Path, part: str, value: object, words: str) -> None:
    path = save(tmp_path, profile())
    asked = replace(KEY, **{part: value})  # type: ignore[arg-type]
    with pytest.raises(ProfileError) as caught:
        load(path, asked)
    assert (
        str(caught.value)
        == f"the profile {path} does not hold here: {words}; measure again with: localspec calibrate"
    )
    with pytest.raises(ProfileError, match="not been measured" if part in ("target", "draft") else words):
        find(tmp_path, asked)
    assert profile_path(tmp_path, asked) != path


def test_every_part_of_the_key_has_its_case_above() -> None:
    assert {part for part, _, _ in DIFFERENCES} == {field.name for field in fields(ProfileKey)}


def test_all_differences_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, profile())
    with pytest.raises(ProfileError, match=r"the processor is x, .*; the number of threads is 1, "):
        load(path, replace(KEY, cpu="x", threads=1))


def test_profiles_of_several_machines_lie_side_by_side(tmp_path: Path) -> None:
    other = replace(KEY, cpu="Other CPU")
    save(tmp_path, profile())
    save(tmp_path, profile(other))
    assert find(tmp_path, KEY).key == KEY
    assert find(tmp_path, other).key == other


def test_a_missing_profile_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"not been measured.*: localspec calibrate$"):
        find(tmp_path / "nothing", KEY)
    with pytest.raises(ProfileError, match=r"there is no profile .*: localspec calibrate$"):
        load(tmp_path / "nothing.json", KEY)


def test_an_unwritable_place_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        save(tmp_path / "file" / "profiles", profile())


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(version=1), "its version is 1, and this localspec reads version 2"),
        (lambda v: v.pop("version"), "lacks a version"),
        (lambda v: v.pop("target"), "profile does not have the fields"),
        (lambda v: v.update(extra=1), "profile does not have the fields"),
        (lambda v: v["key"].update(threads="4"), "profile.key.threads is '4', which is no int"),
        (lambda v: v["key"].update(threads=True), "profile.key.threads is 'True', which is no int"),
        (lambda v: v.update(threads=2.0), "profile.threads is '2.0', which is no int"),
        (lambda v: v.update(plain_tokens_per_s=None), "profile.plain_tokens_per_s is 'None', which is no float"),
        (lambda v: v.update(plain_tokens_per_s=True), "profile.plain_tokens_per_s is 'True', which is no float"),
        (lambda v: v.update(plain_tokens_per_s=float("inf")), "profile.plain_tokens_per_s is 'inf', which is no"),
        (
            lambda v: v.update(draft_temperatures=[{"temperature": 1.0, "draft_temperature": "x"}]),
            r"profile.draft_temperatures\[0\].draft_temperature is 'x', which is no float",
        ),
        (lambda v: v.update(flash_attention="maybe"), "profile.flash_attention is 'maybe'"),
        (lambda v: v.update(verdicts={}), "profile.verdicts is '{}', which is no tuple"),
        (lambda v: v["target"].update(curves=[]), r"profile.target: curves at depths \[\]"),
        (
            lambda v: v["target"]["curves"][0]["points"][1].update(seconds=0),
            r"profile.target.curves\[0\]: a pass over",
        ),
        (lambda v: v["target_plan"]["passes"].append([1]), "profile.target_plan: 4 tokens cannot be evaluated"),
        (lambda v: v["agreement"][0]["token"].pop(), r"profile.agreement\[0\]: code has 2 and 3"),
        (
            lambda v: v["confidence"][0]["model"].update(acceptance=[0.9, 0.6, 0.2]),
            r"confidence\[0\].model: ",
        ),
    ],
)
def test_damage_is_named_in_one_line(tmp_path: Path, change: Change, words: str) -> None:
    values = json.loads(profile().to_json())
    change(values)
    path = profile_path(tmp_path, KEY)
    path.write_text(json.dumps(values))
    with pytest.raises(ProfileError, match=words) as caught:
        find(tmp_path, KEY)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; measure again with: localspec calibrate")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00", '{"version": 1, "target": NaN}', '{"version": [1]}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError, match=r"localspec calibrate$"):
        load(tmp_path / "p.json", KEY)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"[" * 100_000])
def test_bytes_that_are_no_text_or_too_deep_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(ProfileError, match=r"localspec calibrate$"):
        load(tmp_path / "p.json", KEY)


def test_a_number_that_is_none_is_not_written() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        replace(profile(), plain_tokens_per_s=float("nan")).to_json()


# Records


def test_confidence_is_on_lines_between_thresholds() -> None:
    model = ConfidenceModel((0.1, 0.5, 1.0), (0.2, 0.6, 0.9), (0.5,))
    assert [model.predict(x) for x in (0.0, 0.1, 0.5, 1.0, 1.5)] == [0.2, 0.2, 0.6, 0.9, 0.9]
    assert model.predict(0.3) == pytest.approx(0.4)
    assert model.predict(0.75) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("thresholds", "acceptance"),
    [
        ((), ()),
        ((0.1,), (0.1, 0.2)),
        ((0.2, 0.1), (0.1, 0.2)),
        ((0.1, 0.2), (0.3, 0.2)),
        ((0.1,), (1.5,)),
        ((-1,), (0,)),
    ],
)
def test_confidence_models_that_do_not_rise_are_refused(thresholds: Any, acceptance: Any) -> None:
    with pytest.raises(InvalidOptionError, match="confidence model"):
        ConfidenceModel(thresholds, acceptance, (0.5,))


def test_tokens_per_step_are_those_of_the_rule() -> None:
    (agreement,) = profile().agreement
    assert agreement.tokens_per_step() == (1.0, 1.8, 2.45)
    assert agreement.tokens_per_step("token") == (1.0, 1.8, 2.4)


# Prediction


def test_without_catch_up_and_sampler_it_is_the_textbook_formula() -> None:
    alpha, cost, verify = 0.8, 0.25, [1.0, 1.3, 1.7, 1.9, 2.5]
    target = flat({n: 0.04 * v for n, v in enumerate(verify, 1)})
    draft = flat({1: 0.04 * cost, 2: 0.04 * cost})
    tokens = [sum(alpha**k for k in range(gamma + 1)) for gamma in range(5)]
    speedups = predicted_speedups(tokens, target=target, draft=draft, depth=64)
    assert speedups == pytest.approx([speedup(alpha, gamma, cost, verify) for gamma in range(5)])
    assert best(speedups) == best_num_draft_tokens(alpha, cost, 4, verify)[0]


def test_catch_up_plans_sampler_and_depth_are_charged() -> None:
    target = CostCurves(
        (
            CostCurve(0, (PassCost(1, 1, 10.0, 0, 1), PassCost(2, 2, 19.0, 0, 1), PassCost(3, 3, 20.0, 0, 1))),
            CostCurve(100, (PassCost(1, 1, 12.0, 0, 1), PassCost(2, 2, 25.0, 0, 1), PassCost(3, 3, 24.0, 0, 1))),
        )
    )
    draft = flat({1: 2.0, 2: 5.0})
    options: dict[str, Any] = {
        "target": target,
        "draft": draft,
        "depth": 50,
        "sampler": SamplerCost(plain_s=0.1, step_s=0.3, draft_s=0.2),
        "target_plan": EvaluationPlan(((1,), (3,), (3,))),
    }
    tokens = (1.0, 1.5, 1.9)
    plain = 11 + 0.1
    one = plain * 1.5 / (2 + 0.5 * (5 - 2) + 22 + 0.3 + 0.2)
    two = plain * 1.9 / (2 * 2 + 0.4 * (5 - 2) + 22 + 0.3 + 2 * 0.2)
    assert predicted_speedups(tokens, **options) == pytest.approx((1.0, one, two))
    split = predicted_speedups(tokens, **options, draft_plan=EvaluationPlan(((1,), (1, 1))))
    assert split[1] == pytest.approx(plain * 1.5 / (2 + 0.5 * (4 - 2) + 22 + 0.3 + 0.2))


@pytest.mark.parametrize("tokens", [(1.0, 2.5), (0.5,), (1.0, float("nan"))])
def test_impossible_numbers_of_tokens_are_refused(tokens: tuple[float, ...]) -> None:
    with pytest.raises(InvalidOptionError, match="tokens_per_step"):
        predicted_speedups(tokens, target=flat({1: 1.0}), draft=flat({1: 1.0}), depth=0)


def test_the_smallest_among_equals_is_the_best() -> None:
    assert best((1.0, 0.9)) == 0
    assert best((1.0, 1.2, 1.2)) == 1


def test_a_gain_within_the_noise_is_not_worth_drafting() -> None:
    assert best((1.0, 0.9, 1.019, 1.01)) == 0
    assert best((1.0, 0.9, 1.02, 1.01)) == 2


def test_an_always_wrong_and_a_perfect_free_draft() -> None:
    target, free = flat({n: 1.0 + n / 10 for n in range(1, 9)}), flat({1: 1e-6, 2: 1e-6})
    assert best(predicted_speedups([1.0] * 8, target=target, draft=free, depth=0)) == 0
    assert best(predicted_speedups([1.0 + k for k in range(8)], target=target, draft=free, depth=0)) == 7


def test_a_profile_from_before_batches_is_read() -> None:
    values = json.loads(profile().to_json())
    del values["draft_batch"]
    assert Profile.from_json(json.dumps(values)) == profile()
    whole = replace(profile(), draft_batch=flat({1: 0.01, 8: 0.04}))
    assert Profile.from_json(whole.to_json()) == whole
