"""Batches of real models say what one at a time says.

Kernels differ with the size of a pass: a first difference is allowed where it is within the noise measured on that
very prefix, and they are counted (see test_exactness_real).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import localspec
from localspec.backend.llamacpp import LlamaContext
from localspec.batching import BatchRequest
from localspec.sampling import SamplingParams, record_seed
from localspec.session import Session
from tests.test_exactness_real import check_same
from tests.test_laws_real import near_tie

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0)
SYSTEM = "You are a helpful assistant. Answer in one short paragraph and do not ask questions."
QUESTIONS = (
    "Why is the sky blue?",
    "Name three rivers of Europe and say where they end.",
    "What does a compiler do?",
    "How do bees find their way home?",
    "Write a sentence about a harbour.",
    "What is a prime number?",
    "Explain in simple words why ice floats on water, and what would happen to lakes in winter if it did not.",
    "List the months with thirty days.",
    "What is the difference between a list and a tuple in Python?",
    "Say something about owls.",
)
MAX_TOKENS, GAMMA = 24, 2


@pytest.fixture(scope="module")
def session(smollm2_path: Path, smollm2_q4_0_path: Path) -> Iterator[Session]:
    with localspec.load_pair(
        target=smollm2_path, draft=smollm2_q4_0_path, context=256, parallel=8, threads=1, use_profile=False
    ) as loaded:
        yield loaded


def records(rule: str = "block", params: SamplingParams = GREEDY) -> list[BatchRequest]:
    return [
        BatchRequest(
            id=str(i),
            prompt=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            params=params,
            max_tokens=MAX_TOKENS - i,
            rule=rule,
        )
        for i, question in enumerate(QUESTIONS)
    ]


def tokens(session: Session, requests: list[BatchRequest], **options: int) -> dict[str, list[int]]:
    found = {}
    for answer in session.generate_batch(requests, seed=3, **options):
        assert answer.result is not None, answer.error
        found[answer.request.id] = answer.result.tokens
    return found


@pytest.fixture(scope="module")
def plain(session: Session) -> dict[str, list[int]]:
    return tokens(session, records(), parallel=1, num_draft_tokens=0)


@pytest.mark.parametrize("parallel", [1, 2, 4, 8])
@pytest.mark.parametrize("num_draft_tokens", [0, GAMMA])
def test_greedy_batches_are_greedy_decoding(
    session: Session, plain: dict[str, list[int]], parallel: int, num_draft_tokens: int
) -> None:
    found = tokens(session, records(), parallel=parallel, num_draft_tokens=num_draft_tokens)
    ties = 0
    context = LlamaContext(session.pair.target.model, capacity=256, threads=1)
    for record in records():
        prompt = session.encode(record.prompt)
        ties += plain[record.id] != found[record.id]
        check_same(plain[record.id], found[record.id], prompt, context, max(2, parallel * (num_draft_tokens + 1)))
    # Each of them is a near-tie, of which this small model has one in a hundred tokens.
    assert ties <= 7, f"{ties} of {len(QUESTIONS)} answers differ"


def test_a_seed_decides_under_the_coupled_rule(session: Session) -> None:
    """At a temperature, whatever runs beside a record: texts are the same, or first differ at a near-tie."""
    params = SamplingParams(temperature=0.8)
    requests = records("coupled", params)
    alone = tokens(session, requests, parallel=1, num_draft_tokens=0)
    context = LlamaContext(session.pair.target.model, capacity=256, threads=1)
    for order, parallel in ((1, 4), (-1, 8)):
        found = tokens(session, requests[::order], parallel=parallel, num_draft_tokens=GAMMA)
        ties = 0
        for request in requests:
            one, other = alone[request.id], found[request.id]
            at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
            if at is None:
                assert one == other
                continue
            prefix = [*session.encode(request.prompt), *one[: at + 1]]
            tie = near_tie(context, params, prefix, other[at], record_seed(3, request.id))
            assert tie.excuses, tie
            ties += 1
        assert ties <= 9, f"{ties} of {len(QUESTIONS)} answers differ"


def test_a_common_prefix_is_read_once(session: Session) -> None:
    requests = records()
    shared = len(session.encode([{"role": "system", "content": SYSTEM}, {"role": "user", "content": ""}])) - 8
    reused = [
        answer.result.stats.reused_tokens
        for answer in session.generate_batch(requests, seed=3, parallel=4, num_draft_tokens=0)
        if answer.result
    ]
    assert sorted(reused)[0] == 0
    assert sorted(reused)[1] >= shared - 2


def test_room_is_made_when_it_is_needed(smollm2_path: Path) -> None:
    with localspec.load_pair(target=smollm2_path, context=256, threads=1) as narrow:
        assert narrow.pair.target.num_sequences == 1
        batch = narrow.generate_batch(records(), seed=3)
        assert all(answer.result for answer in batch)
        assert batch.progress.plan is not None
        assert narrow.pair.target.num_sequences == batch.progress.plan.parallel > 1
        assert narrow.generate("Why?", GREEDY, max_tokens=3).tokens
