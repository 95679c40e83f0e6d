"""The library's front door, on a session whose models write a script; with real models see test_exactness_real."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec import cli
from localspec.adaptive import AdaptivePolicy
from localspec.backend.llamacpp import LlamaModel
from localspec.encoding import PromptEncoder
from localspec.errors import ContextOverflowError, InvalidOptionError, PromptError
from localspec.generation import Request
from localspec.policy import FixedPolicy
from localspec.profile import DraftTemperatureAt
from localspec.sampling import SamplingParams
from localspec.session import Session, load_pair
from localspec.text import ChatTemplate, template_source
from localspec.tuning import ProfileLookup
from tests.backend.tiny_models import TOKENS, write_mamba
from tests.cli.scripted import PROMPT, scripted_session
from tests.test_profile import profile

SCRIPT = [TOKENS.index(letter) for letter in "abcdefgh"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return LlamaModel(write_mamba(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def scripted(model: LlamaModel, script: list[int], **options: Any) -> Session:
    end = next(token for token in range(len(TOKENS)) if model.vocabulary.ends_generation(token))
    return scripted_session(model.vocabulary, end, script, **options)


@pytest.fixture
def session(model: LlamaModel) -> Session:
    return scripted(model, SCRIPT)


def test_a_session_is_not_freed_under_a_pass_of_another_thread(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, inside, go_on = [], threading.Event(), threading.Event()
    monkeypatch.setattr(session.pair, "close", lambda: closed.append(True), raising=False)
    decode = session.engine.target.decode

    def slow(batch):
        inside.set()
        assert go_on.wait(30)
        return decode(batch)

    monkeypatch.setattr(session.engine.target, "decode", slow, raising=False)
    stream = session.stream(PROMPT, raw=True, num_draft_tokens=0)
    thread = threading.Thread(target=next, args=(stream,))
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(InvalidOptionError, match="busy"):
            session.close()
        with pytest.raises(KeyError, match="what went wrong"), session:
            raise KeyError("what went wrong")
        assert not closed
    finally:
        go_on.set()
        thread.join()
    with session:
        next(stream)  # the refusals left the generation as it was
    assert closed == [True]


@pytest.mark.parametrize("content", ["", " \n"])
def test_messages_without_text_are_an_empty_prompt(session: Session, content: str) -> None:
    for prompt in (content, [{"role": "user", "content": content}]):
        with pytest.raises(PromptError, match="empty"):
            session.stream(prompt)


@pytest.mark.parametrize("prompt", [None, 5, b"bytes"])
def test_what_is_neither_text_nor_messages(session: Session, prompt: object) -> None:
    with pytest.raises(PromptError):
        session.stream(prompt)  # type: ignore[arg-type]


def test_a_text_that_cannot_fit_is_refused_before_ids_are_made_of_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a b " * 17 * session.context
    said = f"{len(text)} characters, more than the {session.context} tokens"
    assert len(session.encode(text, raw=True)) > session.context, "who only counts tokens gets them"
    monkeypatch.setattr(session.vocabulary, "tokenize", None)
    with pytest.raises(ContextOverflowError, match=said):
        session.stream(text, raw=True)
    session._encoder = PromptEncoder(session.vocabulary, ChatTemplate(template_source("chatml", None)), name="x")
    with pytest.raises(ContextOverflowError, match="characters, more than the"):
        session.stream([{"role": "user", "content": text}])


def test_a_seed_may_come_from_numpy(session: Session) -> None:
    result = session.generate(PROMPT, raw=True, num_draft_tokens=2, seed=np.int64(5))
    assert json.loads(json.dumps(result.to_dict()))["seed"] == 5


@pytest.mark.parametrize("options", [{"seed": 1.5}, {"seed": "1"}, {"max_tokens": 2.5}, {"max_tokens": "2"}])
def test_numbers_that_are_not_whole(session: Session, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=f"{next(iter(options))} is"):
        session.stream(PROMPT, raw=True, num_draft_tokens=0, **options)


# --- where drafts come from ---------------------------------------------------------------------------------------


def test_a_target_alone_drafts_by_lookup(model: LlamaModel) -> None:
    alone = scripted(model, SCRIPT * 5, use_draft=False)
    result = alone.generate(PROMPT, raw=True, num_draft_tokens=4)
    assert result.tokens[:-1] == SCRIPT * 5
    # The first eight letters are new, and so is the pair of the last and the first.
    assert result.stats.accepted >= 20
    assert result.stats.steps < 25
    assert alone.generate(PROMPT, raw=True, num_draft_tokens=0).stats.drafted == 0


def test_what_decides_costs_nothing_before_the_first_token(model: LlamaModel) -> None:
    alone = scripted(model, SCRIPT, use_draft=False)
    policy = alone.policy(None, "adaptive", alone.default_params)
    assert isinstance(policy, AdaptivePolicy)
    assert (policy.worthwhile, policy.lookup) == (False, True)
    assert alone.pair.target._held == 0, "nothing was measured"  # type: ignore[attr-defined]
    assert alone.generate(PROMPT, raw=True).tokens[:-1] == SCRIPT


def test_the_drafter_can_be_chosen(model: LlamaModel, session: Session) -> None:
    params = session.default_params
    for drafter, worthwhile, lookup in (("auto", True, True), ("model", True, False), ("lookup", False, True)):
        policy = session.policy(None, "adaptive", params, drafter)  # type: ignore[arg-type]
        assert isinstance(policy, AdaptivePolicy)
        assert (policy.worthwhile, policy.lookup) == (worthwhile, lookup)
        assert session.policy(None, "adaptive", params, drafter) is policy, "what it learned is kept"  # type: ignore[arg-type]
    assert session.policy(3, "adaptive", params) == session.policy(3, "adaptive", params, "model") == FixedPolicy(3)
    assert session.policy(3, "adaptive", params, "lookup") == FixedPolicy(0, 3)
    chosen = scripted(model, SCRIPT, drafter="lookup")
    assert chosen.policy(3, "adaptive", params) == FixedPolicy(0, 3)
    assert chosen.generate(PROMPT, raw=True, num_draft_tokens=3).stats.drafted == 0
    assert chosen.generate(PROMPT, raw=True, num_draft_tokens=3, drafter="model").stats.drafted > 0


def test_without_a_draft_as_asked_for(model: LlamaModel) -> None:
    plain = scripted(model, SCRIPT * 5, use_draft=False, drafter="model")
    assert not plain.can_draft
    assert plain.generate(PROMPT, raw=True).stats.drafted == 0
    with pytest.raises(InvalidOptionError, match=r"4 draft tokens need a draft model.*--drafter lookup"):
        plain.generate(PROMPT, raw=True, num_draft_tokens=4)
    assert plain.generate(PROMPT, raw=True, num_draft_tokens=4, drafter="lookup").stats.accepted > 0
    with pytest.raises(InvalidOptionError, match="no draft model"):
        plain.generate(PROMPT, raw=True, drafter="model")
    assert plain.generate(PROMPT, raw=True, policy="calibrated").stats.drafted == 0
    with pytest.raises(InvalidOptionError, match="calibrated is for draft models"):
        plain.generate(PROMPT, raw=True, policy="calibrated", drafter="lookup")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "frob"}, "'frob'.*auto, model, lookup"),
        ({"drafter": "lookup", "policy": "calibrated"}, "calibrated is for draft models"),
    ],
)
def test_drafters_that_cannot_be(session: Session, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        session.stream(PROMPT, raw=True, **options)


def test_drafters_that_cannot_be_loaded(tmp_path: Path) -> None:
    for options, message in (
        ({"drafter": "frob"}, "frob"),
        ({"drafter": "model", "target": tmp_path / "t.gguf"}, "the drafter is model and there is none"),
        ({"drafter": "model", "use_draft": False}, "switched off"),
        ({"drafter": "lookup", "target": "t.gguf", "draft": "d.gguf"}, "lookup and the draft 'd.gguf'"),
    ):
        with pytest.raises(InvalidOptionError, match=message):
            load_pair(**options)  # type: ignore[arg-type]


def test_a_model_that_cannot_take_tokens_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It decodes plainly, and says so; asked to draft all the same, it refuses."""
    path = str(write_mamba(tmp_path / "tiny.gguf"))
    generate = ["generate", "aaaaaa", "--raw", "--target", path, "-n", "8", "--ctx", "64", "--seed", "1", "--stats"]
    assert cli.main(generate) == 0
    captured = capsys.readouterr()
    assert "cannot take tokens back, so nothing is drafted" in captured.err
    assert "8 tokens" in captured.err
    assert cli.main([*generate, "--no-draft"]) == 0
    assert "cannot take" not in capsys.readouterr().err
    assert cli.main([*generate, "--drafter", "lookup"]) == 1
    assert "cannot take tokens back" in capsys.readouterr().err
    assert cli.main([*generate, "--drafter", "model"]) == 2
    assert "the drafter is model and there is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0.6), ({"rule": "coupled"}, None), ({"draft_temperature": 0.9}, 0.9), ({"temperature": 0.5}, None)],
)
def test_the_draft_runs_at_the_temperature_that_calibration_found(
    session: Session, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: float | None
) -> None:
    found = replace(profile(), draft_temperatures=(DraftTemperatureAt(0.8, 0.6),))
    monkeypatch.setattr(session.pair, "profile", ProfileLookup(found, None))
    requests: list[Request] = []
    start = session.engine.start
    monkeypatch.setattr(session.engine, "start", lambda request: requests.append(request) or start(request))
    params = SamplingParams(temperature=options.pop("temperature", 0.8))
    session.stream(PROMPT, params, raw=True, num_draft_tokens=2, **options)
    draft_params = requests[0].draft_params
    assert (None if draft_params is None else draft_params.temperature) == expected
