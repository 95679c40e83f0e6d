"""What ``localspec predict`` prints, draws and refuses."""

import json
import subprocess
import sys
from typing import ClassVar

import click
import pytest
from click.testing import CliRunner

from localspec.cli.predict import predict
from localspec.errors import InvalidOptionError, LocalspecError, ProfileError
from localspec.theory import expected_tokens, speedup
from tests.test_profile import profile as kept_profile


def run(*arguments, charset="utf-8"):
    """Output of the command; errors pass through, as they do to the program's entry point."""
    result = CliRunner(charset=charset).invoke(predict, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    assert result.stderr == ""
    return result.stdout


def rows(output):
    table = output.split("speedup\n")[1].split("\n\n")[0]
    return [line.split() for line in table.splitlines()]


def test_reference_case():
    output = run("--alpha", "0.8", "--cost", "0.1")
    assert "Cost ratio 0.1: one draft pass takes 0.1 of the time of one target pass." in output
    assert "Draft 6 tokens a step: 2.47 times the speed of plain decoding." in output
    assert "Within 3 % of that: 4 to 8 drafted tokens." in output
    assert "Ceiling at this acceptance rate, however cheap and long the draft: 5.00 times." in output
    table = rows(output)
    assert [row[0] for row in table] == [str(gamma) for gamma in range(13)]
    assert table[6][:4] == ["6", "3.95", "1.60", "2.47"]
    assert [row[-1] == "best" for row in table].index(True) == 6


def test_bars_are_in_proportion():
    bars = [row[4] for row in rows(run("--alpha", "0.8", "--cost", "0.1", "--max-gamma", "3"))]
    assert set("".join(bars)) == {"█"}
    assert len(bars[0]) / len(bars[3]) == pytest.approx(speedup(0.8, 0, 0.1) / speedup(0.8, 3, 0.1), abs=0.03)


def test_plain_characters_where_the_terminal_has_no_others():
    output = run("--alpha", "0.8", "--cost", "0.1", charset="ascii")
    assert output.isascii()
    assert "####" in output


def test_says_when_not_to_speculate():
    output = run("--alpha", "0.8", "--cost", "0.56", "--verify-cost", "1,1.56,2.08,2.5,3.19")
    assert "Do not speculate: the best draft would run at 0.85 times the speed of plain decoding." in output
    assert len(rows(output)) == 5  # as far as the costs go


def test_a_curve_with_a_step():
    output = run("--alpha", "0.95", "--cost", "0.05", "--verify-cost", "1,1.83,2.49,2.03,2.7")
    assert "Draft 3 tokens a step" in output
    assert "larger --max-gamma" not in output


def test_says_when_the_search_ended_too_early():
    assert "a larger --max-gamma may" in run("--alpha", "0.9", "--cost", "0.05", "--max-gamma", "2")
    output = run("--alpha", "0.9", "--cost", "0.05", "--verify-cost", "1,1,1")
    assert "a larger --max-gamma with a longer --verify-cost may" in output


def test_sampling_time_counts():
    table = rows(run("--alpha", "0.8", "--cost", "0.1", "--sampler-cost", "0.5", "--max-gamma", "1"))
    assert table[0][2:4] == ["1.00", "1.00"]
    assert table[1][2] == "1.60"


def test_perfect_agreement_has_no_ceiling():
    assert "No limit" in run("--alpha", "1", "--cost", "0.1")


def test_json():
    found = json.loads(run("--alpha", "0.8", "--cost", "0.1", "--max-gamma", "4", "--json"))
    assert found["best_num_draft_tokens"] == 4
    assert found["predicted_speedup"] == [speedup(0.8, gamma, 0.1) for gamma in range(5)]
    assert found["tokens_per_step"] == [expected_tokens(0.8, gamma) for gamma in range(5)]
    assert (found["acceptance_rate"], found["cost_ratio"], found["verify_cost"]) == (0.8, 0.1, None)
    assert found["ceiling"] == pytest.approx(5)
    assert found["continuous_optimum"] == pytest.approx(5.756, abs=1e-3)
    assert found["verdict"].startswith("Draft 4 tokens")


def test_json_has_no_infinities():
    found = json.loads(run("--alpha", "1", "--cost", "0", "--json"))
    assert found["ceiling"] is None
    assert found["continuous_optimum"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0.8", "10"), r"^--cost is 10\.0; .* Target / draft = 10 means --cost 0\.1$"),
        (("1.5", "0.1"), r"^--alpha is 1\.5"),
        (("nan", "0.1"), "^--alpha is nan"),
        (("0.8", "inf"), "^--cost is inf"),
        (("0.8", "-0.1"), r"^--cost is -0\.1"),
        (("0.8", "0.1", "--verify-cost", "1,1.2", "--max-gamma", "4"), "has 2 numbers; .* needs 5"),
        (("0.8", "0.1", "--verify-cost", "28.6,44.7"), "^--verify-cost.* Divide"),
        (("0.8", "0.1", "--max-gamma", "-1"), "^--max-gamma is -1"),
        (("0.8", "0.1", "--max-gamma", "1001"), "^--max-gamma is 1001"),
        (("0.8", "0.1", "--sampler-cost", "-1"), r"^--sampler-cost is -1\.0"),
    ],
)
def test_refuses_in_the_users_words(arguments, message):
    with pytest.raises(InvalidOptionError, match=message):
        run("--alpha", arguments[0], "--cost", *arguments[1:])


@pytest.mark.parametrize("value", ["", "1,,2", "1;2", "one"])
def test_a_malformed_list_is_a_usage_error(value):
    with pytest.raises(click.UsageError, match="list of numbers"):
        run("--alpha", "0.8", "--cost", "0.1", "--verify-cost", value)


class TestPlot:
    def plot(self, path, *arguments):
        run("--alpha", "0.8", "--cost", "0.1", "--plot", str(path), *arguments)

    @pytest.mark.parametrize(
        ("name", "magic"), [("größe 1.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")]
    )
    def test_kinds(self, tmp_path, name, magic):
        pytest.importorskip("matplotlib")
        self.plot(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(magic)

    def test_a_single_point(self, tmp_path):
        pytest.importorskip("matplotlib")
        self.plot(tmp_path / "a.png", "--max-gamma", "0")

    def test_refuses(self, tmp_path):
        pytest.importorskip("matplotlib")
        for path, message in (
            (tmp_path / "a.txt", "names no kind of picture"),
            (tmp_path / "none" / "a.png", "cannot write"),
        ):
            with pytest.raises(LocalspecError, match=message):
                self.plot(path)
        assert not list(tmp_path.iterdir())

    def test_without_matplotlib_names_the_remedy(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(InvalidOptionError, match=r"pip install 'localspec\[plot\]'"):
            self.plot(tmp_path / "a.png")


def test_needs_neither_numpy_nor_a_model_library():
    code = (
        "import sys; from localspec.cli.predict import predict;"
        "predict(['--alpha', '0.8', '--cost', '0.1'], standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'llama_cpp', 'matplotlib', 'jinja2')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


class TestProfile:
    saved: ClassVar = {
        "acceptance_rate": 0.75,
        "cost_ratio": 0.2,
        "verify_cost": [1.0, 1.2, 1.3],
        "tokens_per_step": [1.0, 1.8, 2.5, 3.0],
        "verdict": "whatever",
    }

    @pytest.fixture
    def write(self, tmp_path):
        path = tmp_path / "profile.json"

        def write(**changes):
            path.write_text(json.dumps(self.saved | changes))
            return str(path)

        return write

    def test_its_numbers_are_used(self, write):
        found = json.loads(run("--profile", write(), "--json"))
        assert found["tokens_per_step"] == [1.0, 1.8, 2.5]  # as far as both lists go
        assert found["predicted_speedup"] == pytest.approx([1, 1.8 / 1.4, 2.5 / 1.7])
        assert found["best_num_draft_tokens"] == 2
        assert "Acceptance rate 0.75" in run("--profile", write())

    def test_a_profile_as_calibrate_keeps_it_will_do(self, tmp_path):
        path = tmp_path / "kept.json"
        kept = kept_profile()
        path.write_text(kept.to_json())
        done = CliRunner().invoke(predict, ("--profile", str(path), "--json"), standalone_mode=False)
        assert "temperature 0.7" in done.stderr
        found = json.loads(done.stdout)
        agreement = kept.agreement[0]
        assert found["tokens_per_step"] == pytest.approx(agreement.tokens_per_step())
        assert found["acceptance_rate"] == agreement.acceptance_rate.value
        assert found["cost_ratio"] == pytest.approx(kept.draft.seconds(1, 256) / kept.target.seconds(1, 256))
        path.write_text(json.dumps({"version": 1}))
        with pytest.raises(ProfileError, match="its version is 1"):
            run("--profile", str(path))

    def test_options_count_instead(self, write):
        found = json.loads(run("--profile", write(), "--cost", "0.9", "--json"))
        assert found["predicted_speedup"] == pytest.approx([1, 1.8 / 2.1, 2.5 / 3.1])
        found = json.loads(run("--profile", write(), "--alpha", "0.5", "--json"))
        assert found["tokens_per_step"] == [1.0, 1.5, 1.75]
        found = json.loads(run("--profile", write(), "--verify-cost", "1,2,3,4", "--json"))
        assert found["predicted_speedup"] == pytest.approx([1, 1.8 / 2.2, 2.5 / 3.4, 3 / 4.6])

    def test_no_further_than_was_measured(self, write):
        with pytest.raises(InvalidOptionError, match=r"--max-gamma is 4, and the profile has .* up to 3"):
            run("--profile", write(), "--max-gamma", "4")
        with pytest.raises(InvalidOptionError, match="has 3 numbers"):
            run("--profile", write(), "--max-gamma", "3")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"acceptance_rate": None}, "has acceptance_rate None where a number belongs"),
            ({"cost_ratio": True}, "has cost_ratio True"),
            ({"verify_cost": None}, "has no list verify_cost"),
            ({"tokens_per_step": []}, "has no list tokens_per_step"),
            ({"tokens_per_step": [1, "2"]}, "has tokens_per_step '2'"),
        ],
    )
    def test_refuses_what_is_missing_or_no_number(self, write, changes, message):
        with pytest.raises(ProfileError, match=message):
            run("--profile", write(**changes))

    @pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "is no JSON object")])
    def test_refuses_another_file(self, tmp_path, content, message):
        path = tmp_path / "a.json"
        path.write_text(content)
        with pytest.raises(ProfileError, match=message):
            run("--profile", str(path))
        with pytest.raises(ProfileError, match="cannot read the profile"):
            run("--profile", str(tmp_path / "none.json"))

    def test_without_it_both_numbers_are_needed(self):
        with pytest.raises(InvalidOptionError, match="give --alpha and --cost, or a --profile"):
            run("--alpha", "0.8")
