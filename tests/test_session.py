"""The library's front door, on a session whose models write a script; with real models see test_exactness_real."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localspec.backend.llamacpp import LlamaModel
from localspec.errors import InvalidOptionError, PromptError
from localspec.generation import Request
from localspec.profile import DraftTemperatureAt
from localspec.sampling import SamplingParams
from localspec.session import Session
from localspec.tuning import ProfileLookup
from tests.backend.tiny_models import TOKENS, write_mamba
from tests.cli.scripted import PROMPT, scripted_session
from tests.test_profile import profile

SCRIPT = [TOKENS.index(letter) for letter in "abcdefgh"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return LlamaModel(write_mamba(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture
def session(model: LlamaModel) -> Session:
    end = next(token for token in range(len(TOKENS)) if model.vocabulary.ends_generation(token))
    return scripted_session(model.vocabulary, end, SCRIPT)


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


def test_a_seed_may_come_from_numpy(session: Session) -> None:
    result = session.generate(PROMPT, raw=True, num_draft_tokens=2, seed=np.int64(5))
    assert json.loads(json.dumps(result.to_dict()))["seed"] == 5


@pytest.mark.parametrize("options", [{"seed": 1.5}, {"seed": "1"}, {"max_tokens": 2.5}, {"max_tokens": "2"}])
def test_numbers_that_are_not_whole(session: Session, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=f"{next(iter(options))} is"):
        session.stream(PROMPT, raw=True, num_draft_tokens=0, **options)


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
