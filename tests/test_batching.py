"""Many requests through a few sequences, on models whose law is known; with real ones see test_batching_real."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localspec
from localspec.backend.llamacpp import LlamaModel
from localspec.backend.vocabulary import Vocabulary
from localspec.batching import BatchAnswer, BatchProgress, BatchRequest
from localspec.errors import EvaluationError, InvalidLogitsError, InvalidOptionError, LocalspecError, ProfileError
from localspec.sampling import LLAMACPP_DEFAULTS, SamplingParams, record_seed
from localspec.session import Session
from localspec.tuning import ProfileLookup
from tests.backend.tiny_models import TOKENS, write_mamba
from tests.fakes import Failure, FakeContext, MarkovModel

END = TOKENS.index("</s>")
V = len(TOKENS)
GREEDY = SamplingParams(temperature=0)
PARALLEL = [1, 2, 4, 8]


def chain(seed: int, *, end: float = 0.02) -> MarkovModel:
    """Return a model that says letters, with a chance of ``end`` for the end after each of them."""
    laws = np.zeros((V, V))
    letters = [TOKENS.index(letter) for letter in "abcdefgh"]
    rows = np.random.default_rng(seed).dirichlet(np.full(len(letters), 0.5), size=V)
    laws[:, letters] = (1 - end) * rows
    laws[:, END] = end
    return MarkovModel(laws)


TARGET, DRAFT, ENDLESS = chain(1), chain(2), chain(1, end=0.0)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    model = LlamaModel(write_mamba(tmp_path_factory.mktemp("model") / "tiny.gguf"))
    yield model.vocabulary
    model.close()


@pytest.fixture
def make(vocabulary: Vocabulary) -> Callable[..., Session]:
    def make(
        num_sequences: int = 16,
        *,
        target: MarkovModel = TARGET,
        draft: MarkovModel | None = DRAFT,
        **options: Any,
    ) -> Session:
        settings = {"capacity": 160, "chunk": 32, "num_sequences": num_sequences}
        contexts: list[Any] = [FakeContext(target, **settings | options)]
        contexts.append(FakeContext(draft, **settings) if draft is not None else None)
        contexts[0].model.vocabulary, contexts[0].model.path = vocabulary, Path("fake.gguf")
        header = SimpleNamespace(cache_bytes=lambda tokens: tokens)
        pair: Any = SimpleNamespace(
            target=contexts[0],
            draft=contexts[1],
            target_header=header,
            draft_header=header if draft is not None else None,
            profile=ProfileLookup(None, "not measured"),
            default_params=LLAMACPP_DEFAULTS,
            close=lambda: None,
        )
        return Session(pair, template=None)

    return make


def records(count: int = 20, **options: Any) -> list[BatchRequest]:
    """Return records of many lengths; every third shares a long beginning with others."""
    made = []
    for i in range(count):
        head = "once upon a time there was a king who had three sons " if i % 3 == 0 else ""
        prompt = f"{head}{'abcdefgh'[i % 8] * (1 + 7 * i % 40)} tell"
        made.append(BatchRequest(id=f"r{i}", prompt=prompt, max_tokens=3 + 5 * i % 23, raw=True, **options))
    return made


def answers(session: Session, requests: list[BatchRequest], **options: Any) -> dict[str, BatchAnswer]:
    """Run a batch; return its answers by id, each id exactly once."""
    options = {"seed": 7, "parallel": 8, "num_draft_tokens": 3, **options}
    found: dict[str, BatchAnswer] = {}
    for answer in session.generate_batch(requests, **options):
        assert answer.request.id not in found
        assert answer.request is requests[answer.index]
        found[answer.request.id] = answer
    assert len(found) == len(requests)
    assert not session._busy.locked()
    return found


def tokens_of(found: dict[str, BatchAnswer]) -> dict[str, list[int]]:
    assert all(a.error is None and a.result is not None for a in found.values())
    return {id: answer.result.tokens for id, answer in found.items() if answer.result}


def one_by_one(session: Session, requests: list[BatchRequest], **options: Any) -> dict[str, list[int]]:
    found = {}
    for r in requests:
        options = {"num_draft_tokens": 3, **options}
        settings: dict[str, Any] = {"max_tokens": r.max_tokens, "seed": record_seed(7, r.id), "raw": True}
        found[r.id] = session.generate(r.prompt, r.params, **settings | options).tokens
    return found


# --- what is said ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_neighbours_change_nothing(make: Any, parallel: int, rule: str, num_draft_tokens: int) -> None:
    """Prefixes that are copied and prompts that are read along with others' steps included."""
    requests = records(params=SamplingParams(temperature=0.9, top_k=6))
    options = {"rule": rule, "num_draft_tokens": num_draft_tokens}
    expected = one_by_one(make(1), requests, **options)
    assert tokens_of(answers(make(), requests, parallel=parallel, **options)) == expected


@pytest.mark.parametrize("parallel", PARALLEL)
def test_greedy_is_plain_greedy(make: Any, parallel: int) -> None:
    requests = records(params=GREEDY)
    expected = one_by_one(make(1, draft=None), requests, num_draft_tokens=0)
    assert tokens_of(answers(make(), requests, parallel=parallel)) == expected


@pytest.mark.parametrize("rule", ["coupled"])
@pytest.mark.parametrize("parallel", [None, *PARALLEL])
def test_under_the_coupled_rule_no_choice_changes_anything(make: Any, rule: str, parallel: int | None) -> None:
    """Whatever costs, the clock and agreement recommend."""
    requests = records()
    expected = one_by_one(make(1, draft=None), requests, rule=rule, num_draft_tokens=0)
    found = answers(make(), requests, parallel=parallel, num_draft_tokens=None, rule=rule)
    assert tokens_of(found) == expected


def test_order_changes_nothing(make: Any) -> None:
    requests = records()
    expected = tokens_of(answers(make(), requests))
    assert tokens_of(answers(make(), requests[::-1], parallel=3)) == expected
    assert tokens_of(answers(make(), requests[5:9])) == {r.id: expected[r.id] for r in requests[5:9]}


def test_one_at_a_time_is_generate(make: Any) -> None:
    (first, *rest) = records(6)
    found = answers(make(1), [first, *rest], parallel=1)
    expected = make(1).generate(first.prompt, seed=record_seed(7, "r0"), max_tokens=3, raw=True, num_draft_tokens=3)
    result = found["r0"].result
    assert result is not None
    assert (result.tokens, result.text, result.finish_reason, result.seed) == (
        expected.tokens,
        expected.text,
        expected.finish_reason,
        expected.seed,
    )
    assert (result.stats.drafted, result.stats.steps) == (expected.stats.drafted, expected.stats.steps)


def test_every_option_of_a_record_counts(make: Any) -> None:
    plain = BatchRequest(id="b", prompt="tell", raw=True, max_tokens=30)
    changed = {
        "params": GREEDY,
        "max_tokens": 4,
        "seed": 99,
        "stop": ("a", "b"),
        "rule": "coupled",
        "draft_temperature": 0.1,
        "special": True,
    }
    for name, value in changed.items():
        record = BatchRequest(**{"id": "a", "prompt": "tell", "raw": True, "max_tokens": 30} | {name: value})
        options = {
            k: v for k, v in {"seed": record_seed(7, "a"), "max_tokens": 30, name: value}.items() if k != "params"
        }
        expected = make(1).generate("tell", record.params, raw=True, num_draft_tokens=3, **options)
        got = answers(make(), [plain, record])["a"]
        assert got.result is not None
        assert (got.result.text, got.result.tokens) == (expected.text, expected.tokens)


def test_the_seed_of_a_record() -> None:
    """Pinned: files written by one version are resumed by another."""
    assert record_seed(1, "a") == 4513573357067917
    assert record_seed(1, "a") == record_seed(1 + 2**64, "a")
    assert record_seed(-1, "\ud800") < 2**53
    seeds = {record_seed(seed, str(i)) for seed in range(3) for i in range(1000)}
    assert len(seeds) == 3000


# --- how it runs ----------------------------------------------------------------------------------------------


def test_requests_are_pulled_as_there_is_room(make: Any) -> None:
    pulled = 0

    def source() -> Iterator[BatchRequest]:
        nonlocal pulled
        for record in itertools.cycle(records(50)):
            pulled += 1
            yield record

    batch = make().generate_batch(source(), seed=1, parallel=4, num_draft_tokens=2)
    assert pulled == 0
    for finished in range(1, 40):
        next(batch)
        assert pulled <= finished + 4 + 1
    batch.close()


def test_a_finished_sequence_makes_room_at_once(make: Any) -> None:
    """One long record and many short ones: the others' places are never empty."""
    requests = [BatchRequest(id=str(i), prompt="tell", raw=True, max_tokens=120 if i == 0 else 6) for i in range(40)]
    running: list[int] = []
    session = make(4, target=ENDLESS, draft=None)
    found = answers(session, requests, parallel=4, num_draft_tokens=0, progress=lambda c: running.append(c.running))
    assert all(a.result and a.result.stats.tokens == a.request.max_tokens for a in found.values())
    # The 39 short ones take 6 passes each, three at a time, and the long one its 120 beside them.
    assert session.pair.target.passes == len(running) == 120
    assert max(running) <= 4


def test_others_go_on_while_a_long_prompt_is_read(make: Any) -> None:
    emitted: list[int] = []
    requests = [
        BatchRequest(id="short", prompt="a", raw=True, max_tokens=100),
        BatchRequest(id="long", prompt="bcde " * 28, raw=True, max_tokens=5),
    ]
    session = make(2, target=ENDLESS, draft=None)
    answers(session, requests, parallel=2, num_draft_tokens=0, progress=lambda counts: emitted.append(counts.tokens))
    assert all(b > a for a, b in itertools.pairwise(emitted)), "no pass without a token for anyone"
    assert session.pair.target.passes <= 101


def test_a_common_prefix_is_read_once(make: Any) -> None:
    head = "you are a helpful assistant who answers in short words and never lies about it "
    requests = [
        BatchRequest(id=str(i), prompt=head + letter, raw=True, max_tokens=8) for i, letter in enumerate("abcdefgh")
    ]
    session = make()
    found = tokens_of(answers(session, requests))
    target, draft = session.pair.target, session.pair.draft
    length = len(session.encode(requests[0].prompt, raw=True))
    for context in (target, draft):
        assert context.copied >= 7 * (length - 3)
    assert target.tokens_read < length + 8 * (4 + 8 * 4)
    unshared = make(rollback="refused")  # copies nothing, and cannot forget either: so without drafts
    plain = tokens_of(answers(unshared, requests, num_draft_tokens=0))
    assert unshared.pair.target.copied == 0
    assert plain == tokens_of(answers(make(), requests, num_draft_tokens=0))
    assert found == one_by_one(make(1), requests)


def test_what_was_done_is_counted(make: Any) -> None:
    seen: list[tuple[int, int]] = []
    session = make()
    batch = session.generate_batch(
        records(), seed=7, parallel=4, num_draft_tokens=3, progress=lambda c: seen.append((c.tokens, c.answers))
    )
    results = [answer.result for answer in batch]
    counts = batch.progress
    assert isinstance(counts, BatchProgress)
    assert counts.plan is not None
    assert (counts.plan.parallel, counts.plan.num_draft_tokens) == (4, 3)
    assert counts.tokens == sum(r.stats.tokens for r in results if r)
    assert counts.accepted == sum(r.stats.accepted for r in results if r)
    assert counts.drafted == sum(r.stats.drafted for r in results if r)
    assert (counts.answers, counts.errors, counts.running) == (20, 0, 0)
    assert counts.passes == len(seen)
    assert seen == sorted(seen)


def test_an_automatic_choice_is_made_once_costs_are_known(make: Any) -> None:
    session = make()
    batch = session.generate_batch(records(), seed=1)
    assert batch.progress.plan is None
    assert len(list(batch)) == 20
    assert batch.progress.plan is not None
    assert 1 <= batch.progress.plan.parallel <= 16
    assert batch.progress.plan.tokens_per_s is not None


def test_few_requests_need_few_sequences(make: Any) -> None:
    for count in (0, 1, 3):
        batch = make().generate_batch(records(count), seed=1)
        assert len(list(batch)) == count
        assert batch.progress.plan is not None
        assert batch.progress.plan.parallel <= max(1, count)


def test_without_a_draft_nothing_is_drafted(make: Any) -> None:
    for parallel in (None, 2, 4):  # one at a time is as ``generate``, which copies then
        batch = make(draft=None).generate_batch(records(), seed=1, parallel=parallel)
        assert all(answer.result for answer in batch)
        assert batch.progress.drafted == 0


# --- what goes wrong ------------------------------------------------------------------------------------------


def test_bad_records_are_errors_and_the_others_go_on(make: Any) -> None:
    good = records(9)
    bad: dict[str, dict[str, Any]] = {
        "too long": {"prompt": "abc " * 100},
        "empty": {"prompt": ""},
        "surrogate": {"prompt": "a\ud800"},
        "no text": {"prompt": 5},
        "no tokens": {"max_tokens": 0},
        "half a token": {"max_tokens": 2.5},
        "rule": {"rule": "dice"},
        "seed": {"seed": 1.5},
        "draft temperature": {"draft_temperature": -1},
        "no template": {"raw": False},
        "banned": {"params": SamplingParams(logit_bias={V + 5: 1.0})},
        "bad id": {"id": 5},
        "params": {"params": {"temperature": 0}},
        "stop": {"stop": None},
        "far too long": {"prompt": "a b " * 5000},
    }
    broken = [BatchRequest(**{"id": name, "prompt": "abc", "raw": True} | options) for name, options in bad.items()]
    mixed = [record for pair in itertools.zip_longest(good, broken) for record in pair if record is not None]
    found = answers(make(), mixed, parallel=3)
    expected = tokens_of(answers(make(), good))
    for record in mixed:
        answer = found[record.id]
        if record in good:
            assert answer.result is not None
            assert answer.result.tokens == expected[record.id]
        else:
            assert answer.result is None
            assert isinstance(answer.error, LocalspecError), record.id
    assert {type(found[name].error).__name__ for name in ("too long", "far too long")} == {"ContextOverflowError"}


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_bad_row_is_the_error_of_its_record_alone(make: Any, num_draft_tokens: int, at: int) -> None:
    requests = records(8)
    expected = tokens_of(answers(make(), requests, num_draft_tokens=num_draft_tokens))
    prompt = make().encode(requests[5].prompt, raw=True)

    def spoil(prefix: Any) -> float | None:
        return np.nan if len(prefix) == len(prompt) + at and list(prefix[: len(prompt)]) == prompt else None

    session = make(spoil=spoil)
    found = answers(session, requests, num_draft_tokens=num_draft_tokens)
    assert isinstance(found["r5"].error, InvalidLogitsError)
    assert found["r5"].result is None
    for id, tokens in expected.items():
        if id != "r5":
            result = found[id].result
            assert result is not None
            assert result.tokens == tokens


@pytest.mark.parametrize("at", range(1, 25))
@pytest.mark.parametrize("kept", ["none", "half"])
def test_a_pass_that_fails_once_loses_nothing(make: Any, at: int, kept: Any) -> None:
    requests = records(10)
    expected = tokens_of(answers(make(), requests))
    failing = make(failure=Failure(at, EvaluationError("the pass failed"), kept))
    assert tokens_of(answers(failing, requests, parallel=4)) == expected


def test_a_record_that_fails_every_pass_fails_alone(make: Any) -> None:
    requests = records(10)
    expected = tokens_of(answers(make(), requests))
    session = make()
    marked = session.encode(requests[4].prompt, raw=True)
    decode = session.pair.target.decode

    def poisoned(batch: Any) -> Any:
        for span in batch:
            text = [*session.pair.target.held[span.sequence], *span.tokens]
            if text[: len(marked)] == marked:
                raise EvaluationError("this one is poison")
        return decode(batch)

    session.pair.target.decode = poisoned
    found = answers(session, requests, parallel=4)
    assert str(found["r4"].error) == "this one is poison"
    assert {i: a.result.tokens for i, a in found.items() if a.result} == {
        i: t for i, t in expected.items() if i != "r4"
    }


def test_an_error_of_the_source_ends_the_batch_and_leaves_the_session(make: Any) -> None:
    def source() -> Iterator[BatchRequest]:
        yield from records(3)
        raise OSError("the disk is gone")

    session = make()
    with pytest.raises(OSError, match="disk"):
        list(session.generate_batch(source(), seed=1, parallel=2, num_draft_tokens=0))
    assert len(answers(session, records(5))) == 5


@pytest.mark.parametrize("how", ["close", "with", "break", "interrupt", "progress"])
def test_an_early_end_leaves_the_session_usable(make: Any, how: str) -> None:
    session = make()
    expected = tokens_of(answers(make(), records()))
    if how == "close":
        batch = session.generate_batch(records(), seed=7, parallel=4, num_draft_tokens=3)
        next(batch)
        batch.close()
        assert list(batch) == []
    elif how == "with":
        with session.generate_batch(records(), seed=7, parallel=4, num_draft_tokens=3) as batch:
            next(batch)
    elif how == "break":
        for _answer in session.generate_batch(records(), seed=7, parallel=4, num_draft_tokens=3):
            break
        gc.collect()
    elif how == "interrupt":
        session.pair.target.failure = Failure(9, KeyboardInterrupt(), "all")
        with pytest.raises(KeyboardInterrupt):
            list(session.generate_batch(records(), seed=7, parallel=4, num_draft_tokens=3))
    else:

        def stop(counts: BatchProgress) -> None:
            if counts.passes == 5:
                raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            list(session.generate_batch(records(), seed=7, parallel=4, num_draft_tokens=3, progress=stop))
    assert all(session.pair.target.length(sequence) == 0 for sequence in range(8))
    assert tokens_of(answers(session, records())) == expected
    assert session.generate("tell", raw=True, num_draft_tokens=2, max_tokens=5, seed=1).tokens


def test_a_session_is_busy_while_a_batch_is_open(make: Any) -> None:
    session = make()
    batch = session.generate_batch(records(), seed=7, parallel=4, num_draft_tokens=3)
    session.generate("tell", raw=True, max_tokens=3, num_draft_tokens=0)  # nothing runs yet
    next(batch)
    caught: list[Exception] = []

    def other() -> None:
        for use in (
            lambda: session.generate("tell", raw=True, num_draft_tokens=0),
            lambda: list(session.generate_batch(records(), parallel=2, num_draft_tokens=0)),
        ):
            try:
                use()
            except InvalidOptionError as error:
                caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(caught) == 2
    assert all("busy" in str(error) for error in caught)
    assert len(list(batch)) == 19
    with session:  # leaving closes a batch that is still open
        next(session.generate_batch(records(), seed=7, parallel=4, num_draft_tokens=3))
        left = session.generate_batch(records(), seed=7, parallel=4, num_draft_tokens=3)
        next(left)
    assert list(left) == []
    session = make()
    with session:  # not only the one that was made last
        left = session.generate_batch(records(), seed=7, parallel=4, num_draft_tokens=3)
        next(left)
        session.generate_batch(records(), seed=7)
    assert list(left) == []


def test_what_is_no_request_is_an_error_of_its_own(make: Any) -> None:
    wrong: Any = {"id": "a", "prompt": "b"}
    found = list(make().generate_batch([wrong, *records(1)], seed=7, parallel=1, num_draft_tokens=0))
    assert [type(answer.error) for answer in found] == [InvalidOptionError, type(None)]


def test_two_threads_do_not_share_a_batch(make: Any) -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def wait(_counts: BatchProgress) -> None:
        waiting.set()
        go_on.wait(20)

    batch = make().generate_batch(records(), seed=7, parallel=2, num_draft_tokens=0, progress=wait)
    found: list[BatchAnswer] = []
    thread = threading.Thread(target=lambda: found.extend(batch))
    thread.start()
    assert waiting.wait(20)
    try:
        with pytest.raises(InvalidOptionError, match="the batch is busy"):
            next(batch)
        with pytest.raises(InvalidOptionError, match="the batch is busy"):
            batch.close()
    finally:
        go_on.set()
        thread.join()
    assert len(found) == 20


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"parallel": 0}, InvalidOptionError, "parallel is 0"),
        ({"parallel": 1000}, InvalidOptionError, "parallel is 1000"),
        ({"parallel": True}, InvalidOptionError, "parallel is True"),
        ({"parallel": 2.5}, InvalidOptionError, "parallel is 2.5"),
        ({"num_draft_tokens": -1}, InvalidOptionError, "draft tokens is -1"),
        ({"rule": "dice"}, InvalidOptionError, "rule is 'dice'"),
        ({"seed": "x"}, InvalidOptionError, "seed is 'x'"),
        ({"policy": "bold"}, InvalidOptionError, "policy is 'bold'"),
        ({"policy": "calibrated"}, ProfileError, "not measured"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(make: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make().generate_batch(records(), **options)
    if options.get("policy") == "bold":
        with pytest.raises(error, match=message):
            make(draft=None).generate_batch(records(), **options)
    if "num_draft_tokens" not in options:
        return
    with pytest.raises(InvalidOptionError, match="need a draft"):
        make(draft=None).generate_batch(records(), num_draft_tokens=2)


def test_more_sequences_than_the_contexts_have(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made for them, and it stays."""
    narrow, wide = make(2), make(6)
    asked: list[int] = []

    def widened(pair: Any, num_sequences: int) -> Any:
        asked.append(num_sequences)
        return wide.pair

    monkeypatch.setattr("localspec.session.widened", widened)
    expected = tokens_of(answers(make(), records()))
    for _ in range(2):
        assert tokens_of(answers(narrow, records(), parallel=6)) == expected
    assert asked == [6]


def test_names_are_published() -> None:
    assert localspec.BatchRequest is BatchRequest
    assert localspec.BatchAnswer is BatchAnswer
