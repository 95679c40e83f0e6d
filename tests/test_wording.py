"""Numbers in messages."""

import pytest

from localspec.wording import counted


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (1000, "1000 tokens")]
)
def test_one_is_not_several(number, said):
    assert counted(number, "token") == said
