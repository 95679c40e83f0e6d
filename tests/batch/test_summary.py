"""What a run did, in numbers."""

import pytest

from localspec.batch.summary import PlainSpeed, Tally, implied_acceptance
from localspec.generation import Stats
from localspec.theory import expected_tokens


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.8, 1.0])
@pytest.mark.parametrize("lengths", [[1], [4], [1, 2, 8]])
def test_the_implied_acceptance_is_the_one_that_was(alpha, lengths):
    drafted_at, accepted_at = [0.0] * 8, [0.0] * 8
    for length in lengths:
        for i in range(length):
            drafted_at[i] += 1000
            accepted_at[i] += 1000 * alpha ** (i + 1)
    assert implied_acceptance(drafted_at, accepted_at) == pytest.approx(alpha, abs=1e-9)
    if len(lengths) == 1:
        assert 1 + sum(accepted_at) / 1000 == pytest.approx(expected_tokens(alpha, lengths[0]))


def test_without_drafts_there_is_no_acceptance():
    assert implied_acceptance([], []) is None


def test_answers_add_up():
    tally = Tally(10, resumed=3)
    tally.add(Stats(prompt_tokens=5, tokens=7, steps=3, drafted=4, accepted=2, drafted_at=[3, 1], accepted_at=[2, 0]))
    tally.add(Stats(prompt_tokens=1, tokens=1, steps=1, drafted=3, drafted_at=[1, 1, 1], accepted_at=[0, 0, 0]))
    tally.errors, tally.elapsed_s = 1, 4.0
    assert (tally.done, tally.answers, tally.tokens_per_s) == (6, 2, 2.0)
    assert (tally.stats.prompt_tokens, tally.stats.drafted_at, tally.stats.accepted_at) == (6, [4, 2, 1], [2, 0, 0])
    assert tally.accepted_per_step == 0.5


def test_plain_speed_is_that_of_the_sample():
    sample = [
        Stats(prompt_tokens=100, reused_tokens=50, tokens=31, prefill_s=1.0, wall_s=6.0),
        Stats(prompt_tokens=50, tokens=21, prefill_s=1.0, wall_s=4.0),
        Stats(prompt_tokens=50, tokens=21, prefill_s=30.0, wall_s=90.0),  # the machine was elsewhere
        Stats(prompt_tokens=50, tokens=1, prefill_s=1.0),
    ]
    speed = PlainSpeed.of(sample)
    assert (speed.num_rows, speed.num_tokens, speed.prompt_token_s, speed.token_s) == (3, 73, 0.02, 0.2)
    assert speed.seconds(Stats(prompt_tokens=30, reused_tokens=20, tokens=5), 2) == pytest.approx(0.2 + 0.6)


def test_a_prompt_out_of_the_cache_tells_nothing_of_reading():
    read = Stats(prompt_tokens=1000, tokens=32, prefill_s=2.0, wall_s=1.0)
    reused = Stats(prompt_tokens=1000, reused_tokens=999, tokens=32, prefill_s=0.03, wall_s=1.0)
    assert PlainSpeed.of([read, reused, reused]).prompt_token_s == 0.002


@pytest.mark.parametrize("tokens", [[], [1] * 100, [32, 32], [21, 21, 21], [400]])
def test_a_sample_of_few_rows_or_tokens_shows_no_speed(tokens):
    assert PlainSpeed.of([Stats(prompt_tokens=5, tokens=n, prefill_s=1.0, wall_s=1.0) for n in tokens]) is None
