"""The verdict, the tables and the picture, from numbers alone."""

import sys
from dataclasses import replace

import pytest

from localspec.acceptance import Interval
from localspec.calibration.agreement import KindAgreement, RuleAgreement
from localspec.calibration.report import Findings, MeasuredSpeed, choose, render, save_picture, verdict
from localspec.errors import InvalidOptionError
from localspec.theory import expected_tokens, speedup


def agreement(kind, acceptance_rate, temperature=0.8, *, spread=0.02, longest=6):
    """Agreement that follows the textbook, with intervals of ``spread`` in α to either side."""

    def tokens(alpha):
        return tuple(expected_tokens(min(max(alpha, 0), 1), gamma) for gamma in range(longest + 1))

    low, high = acceptance_rate - spread, acceptance_rate + spread
    rule = RuleAgreement(
        tokens(acceptance_rate),
        tuple(Interval(a, b) for a, b in zip(tokens(low), tokens(high), strict=True)),
        tuple(acceptance_rate**i for i in range(longest + 1)),
    )
    return KindAgreement(kind, temperature, 240, 5, acceptance_rate, Interval(low, high), rule, rule)


CHEAP = (0.030, 0.031, 0.032, 0.033, 0.034, 0.035, 0.036)
STEEP = (0.0286, 0.0447, 0.0594, 0.0714, 0.0912, 0.1, 0.11)
DRAFT = (0.003, 0.004, 0.005)


def findings(*agreements, target_pass_s=CHEAP, draft_pass_s=DRAFT, **options):
    return Findings(
        target="big", draft="small", target_pass_s=target_pass_s, draft_pass_s=draft_pass_s, agreements=agreements,
        temperature=0.8, **options,
    )  # fmt: skip


class TestChoice:
    def test_is_what_the_theory_says(self):
        found = findings(agreement("all", 0.8))
        (choice,) = choose(found)
        costs = [seconds / CHEAP[0] for seconds in CHEAP]
        expected = [speedup(0.8, gamma, 0.1, costs) for gamma in range(7)]
        assert choice.speedup == pytest.approx(max(expected))
        assert expected[choice.num_draft_tokens] == max(expected)
        assert choice.interval.low < choice.speedup < choice.interval.high
        assert choice.is_clear

    def test_the_pooled_one_is_last(self):
        found = findings(agreement("all", 0.8), agreement("code", 0.9), agreement("code", 0.95, 0.0))
        assert [choice.kind for choice in choose(found)] == ["code", "all"]

    def test_drafts_no_longer_than_costs_are_known_for(self):
        (choice,) = choose(findings(agreement("all", 1.0, spread=0), target_pass_s=CHEAP[:3]))
        assert choice.num_draft_tokens == 2

    def test_sampling_time_counts(self):
        slow, fast = (choose(findings(agreement("all", 0.8), sampler_cost=cost))[0] for cost in (0.5, 0))
        assert slow.speedup < fast.speedup

    def test_a_draft_slower_than_the_target(self):
        (choice,) = choose(findings(agreement("all", 0.9), draft_pass_s=(0.05,)))
        assert choice.num_draft_tokens == 0

    def test_refuses_a_temperature_that_was_not_measured(self):
        with pytest.raises(InvalidOptionError, match=r"temperature 0\.8"):
            findings(agreement("all", 0.8, 0.0))


class TestVerdict:
    def test_not_to_speculate(self):
        found = findings(agreement("code", 0.85), agreement("all", 0.8), target_pass_s=STEEP, draft_pass_s=(0.0162,))
        assert verdict(found) == (
            "On this machine: do not speculate with this pair: a pass over 4 tokens costs 2.5 passes over one,"
            " a draft pass 0.57; the best draft (1 token) would run at 0.85 times plain speed."
        )

    def test_one_kind_of_prompts(self):
        assert verdict(findings(agreement("all", 0.8))) == "On this machine: draft 5 tokens for all (2.21x)."

    def test_some_kinds_and_others_not(self):
        found = findings(
            agreement("prose", 0.1), agreement("code", 0.9), agreement("questions", 0.6), agreement("chat", 0.05),
            agreement("all", 0.7), target_pass_s=(0.03, 0.033, 0.038, 0.045, 0.06, 0.08, 0.1),
        )  # fmt: skip
        assert verdict(found) == (
            "On this machine: draft 3 tokens for code (1.91x); 2 tokens for questions (1.34x);"
            " none for prose and chat."
        )

    def test_a_gain_that_may_be_chance(self):
        found = findings(agreement("code", 0.25, spread=0.15), agreement("all", 0.25, spread=0.15))
        assert verdict(found) == "On this machine: draft 1 token for code (1.10x, perhaps by chance)."

    def test_a_gain_that_no_policy_would_speculate_for(self):
        found = replace(findings(agreement("all", 0.8)), predict=lambda tokens: (1.0, 1.012, 0.9))
        said = verdict(found)
        assert "do not speculate" in said
        assert said.endswith("the best draft (1 token) would run at 1.01 times plain speed, no gain worth having.")
        assert choose(found)[0].speedup == 1.0

    def test_an_always_wrong_draft(self):
        found = findings(agreement("all", 0.0, spread=0), draft_pass_s=(1e-6,))
        assert "do not speculate" in verdict(found)

    def test_a_free_perfect_draft(self):
        found = findings(agreement("all", 1.0, spread=0), draft_pass_s=(1e-9,))
        assert choose(found)[0].num_draft_tokens == 6

    def test_no_draft_length_measured(self):
        assert "no draft length was measured" in verdict(findings(agreement("all", 0.8), target_pass_s=CHEAP[:1]))


class TestRender:
    everything = findings(
        agreement("code", 0.85), agreement("a kind of text with a long name", 0.6), agreement("all", 0.8),
        agreement("code", 0.9, 0.0), agreement("all", 0.9, 0.0),
        measured=(MeasuredSpeed("code", 0.8, 2, 1.9), MeasuredSpeed("code", 0.8, 40, 1.5)),
    )  # fmt: skip

    def test_says_it_all_in_80_columns(self):
        text = render(self.everything)
        assert max(map(len, text.splitlines())) <= 80
        assert "big: 30.0 ms a token, 33.3 tokens/s without a draft" in text
        assert "  2   1.03  " in text
        assert "code          0.90 (0.88-0.92)  0.85 (0.83-0.87)" in text
        assert "a kind of tex -                 0.60 (0.58-0.62)" in text
        assert "textbook        0.80  0.64" in text
        assert verdict(self.everything) == " ".join(text.split("\n\n")[-1].split())

    def test_compares_prediction_with_measurement(self):
        lines = render(self.everything).splitlines()
        (row,) = [line for line in lines if line.endswith("%")]
        predicted = self.everything.speedups(self.everything.agreements[0].block.tokens_per_step)[2]
        assert row.split() == [
            "code",
            "0.8",
            "2",
            f"{predicted:.2f}",
            "1.90",
            f"{100 * (predicted / 1.9 - 1):+.0f}",
            "%",
        ]

    def test_a_single_prompt(self):
        lone = agreement("all", 0.8)
        rule = replace(lone.block, intervals=None, accepted_prefix=(1.0,))
        text = render(findings(replace(lone, acceptance_interval=None, token=rule, block=rule)))
        assert "all           0.80\n" in text
        assert "textbook" not in text

    @pytest.mark.parametrize("longest", [6, 12, 32])
    def test_no_line_is_wider_than_a_terminal(self, longest):
        # Each kind is best at another length, so that many columns ask for room.
        kinds = [agreement(f"a long kind {i}", 0.5 + 0.1 * i, longest=longest) for i in range(5)]
        costs = tuple(0.03 + 0.0001 * n for n in range(longest + 1))
        found = findings(*kinds, agreement("all", 0.7, longest=longest), target_pass_s=costs)
        found = replace(found, target="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", draft="a-" * 50)
        text = render(found)
        assert max(map(len, text.splitlines())) <= 80
        assert "without a draft" in " ".join(text.split())
        (numbers,) = [line for line in text.splitlines() if line.endswith("  best")]
        shown = {int(number) for number in numbers.split()[:-1]}
        assert {choice.num_draft_tokens for choice in choose(found)} <= shown

    def test_plain_characters(self):
        assert render(self.everything, bar="#").isascii()


class TestPicture:
    @pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
    def test_kinds(self, tmp_path, name, magic):
        pytest.importorskip("matplotlib")
        save_picture(tmp_path / name, TestRender.everything)
        assert (tmp_path / name).read_bytes().startswith(magic)

    def test_shows_curves_and_points(self, tmp_path):
        pytest.importorskip("matplotlib")
        save_picture(tmp_path / "a.svg", TestRender.everything)
        drawn = (tmp_path / "a.svg").read_text()
        for text in ("Cost of a pass", "Predicted speed", "Accepted together", "Acceptance by temperature",
                     "measured", "all, by the textbook"):  # fmt: skip
            assert f"<!-- {text}" in drawn

    def test_without_matplotlib_names_the_remedy(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(InvalidOptionError, match=r"pip install 'localspec\[plot\]'"):
            save_picture(tmp_path / "a.png", TestRender.everything)
