import pytest

from localspec.backend.threads import usable_cores
from localspec.errors import InvalidOptionError


def test_at_least_one_core_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALSPEC_THREADS", raising=False)
    assert usable_cores() >= 1


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_THREADS", "7")
    assert usable_cores() == 7


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LOCALSPEC_THREADS", value)
    with pytest.raises(InvalidOptionError, match="LOCALSPEC_THREADS"):
        usable_cores()
