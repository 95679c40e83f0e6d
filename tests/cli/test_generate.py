"""What ``generate`` says beside the answer."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from localspec import cli
from localspec.cli import generate
from localspec.generation import Stats
from localspec.policy import FixedPolicy
from localspec.sampling import LLAMACPP_DEFAULTS


class _Stream(list[Any]):
    stats = Stats(prompt_tokens=3)
    seed = 7


def say(policy: Any, draft: object, *arguments: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    session = SimpleNamespace(
        default_params=LLAMACPP_DEFAULTS,
        pair=SimpleNamespace(draft=draft),
        stream=lambda *_, **__: _Stream(),
        policy=lambda *_: policy,
    )
    monkeypatch.setattr(generate, "open_session", contextmanager(lambda values: iter([session])))
    assert cli.main(["generate", "Hi", "--stats", *arguments]) == 0
    return str(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("policy", "draft", "arguments", "said"),
    [
        (SimpleNamespace(worthwhile=False), 1, (), True),
        (FixedPolicy(0), 1, ("--policy", "calibrated"), True),
        (SimpleNamespace(worthwhile=True), 1, (), False),
        (FixedPolicy(3), 1, ("--policy", "calibrated"), False),
        (FixedPolicy(0), 1, ("--gamma", "0"), False),
        (FixedPolicy(0), None, (), False),
    ],
)
def test_why_the_draft_model_is_not_used(
    policy: Any,
    draft: object,
    arguments: tuple[str, ...],
    said: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    err = say(policy, draft, *arguments, capsys=capsys, monkeypatch=monkeypatch)
    assert ("calibrate found that it does not pay" in err) == said
