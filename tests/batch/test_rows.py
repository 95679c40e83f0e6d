"""Rows: what they may say, and what is said of those that say something else."""

import json
import re
import sys

import pytest

from localspec.batch.prompts import Line
from localspec.batch.rows import RowDefaults, RowReader
from localspec.errors import InvalidOptionError, LocalspecError, PromptError
from localspec.sampling import SamplingParams
from localspec.text import Message

PARAMS = SamplingParams(temperature=0.8, top_k=40)


def reader(**defaults):
    return RowReader(RowDefaults(params=PARAMS, **defaults), seed=5)


def read(values, *, number=1, **defaults):
    data = values if isinstance(values, bytes) else json.dumps(values).encode()
    return reader(**defaults).read(Line(number, data))


def openai(body, **outer):
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body, **outer}


def request(values, **defaults):
    row = read(values, **defaults)
    assert not isinstance(row.content, LocalspecError), row.content
    return row.content


def test_a_bare_prompt_takes_every_default():
    found = request(
        {"prompt": "hello"}, max_tokens=9, stop=("x",), rule="coupled", draft_temperature=0.5, raw=True, special=True
    )
    assert (found.prompt, found.params, found.max_tokens, found.stop) == ("hello", PARAMS, 9, ("x",))
    assert (found.rule, found.draft_temperature, found.raw, found.special) == ("coupled", 0.5, True, True)


def test_a_row_overrides_what_it_names_and_nothing_else():
    found = request(
        {
            "prompt": "hello",
            "temperature": 0,
            "penalty_last_n": None,
            "logit_bias": {"7": -1.5},
            "banned": [3],
            "sampler_order": "huggingface",
            "max_tokens": 3,
            "seed": 11,
            "stop": "end",
            "rule": "token",
            "draft_temperature": 1,
            "raw": True,
            "special": False,
        },
        max_tokens=9,
        stop=("x",),
    )
    assert found.params == SamplingParams(
        temperature=0,
        top_k=40,
        penalty_last_n=None,
        logit_bias={7: -1.5},
        banned=(3,),
        sampler_order="huggingface",
    )
    assert (found.max_tokens, found.seed, found.stop, found.rule) == (3, 11, ("end",), "token")
    assert (found.draft_temperature, found.raw, found.special) == (1, True, False)


def test_null_leaves_an_option_open():
    found = request(
        {"prompt": "a", "temperature": None, "max_tokens": None, "stop": None, "seed": None}, max_tokens=4
    )
    assert (found.params, found.max_tokens, found.stop) == (PARAMS, 4, ())


def test_seeds_depend_on_the_seed_and_the_id_alone():
    ids = ["a", "b", None, 7]
    rows = [{"prompt": "x"} | ({} if i is None else {"id": i}) for i in ids]
    forwards = reader()
    seeds = {
        str(row.id): row.content.seed
        for row in (forwards.read(Line(n, json.dumps(r).encode())) for n, r in enumerate(rows, 1))
    }
    assert len(set(seeds.values())) == 4
    for name in ("a", "b", "7"):
        assert request({"id": name, "prompt": "y", "temperature": 0.1}).seed == seeds[name]
    assert read({"prompt": "x"}, number=3).content.seed == seeds["3"]


def test_ids_come_back_as_they_were_given_and_default_to_the_line():
    assert read({"id": "a", "prompt": "x"}).id == "a"
    assert read({"id": 5, "prompt": "x"}).id == 5
    assert read({"prompt": "x"}, number=12).id == 12
    assert read({"id": None, "prompt": "x"}, number=12).id == 12


@pytest.mark.parametrize(("first", "second"), [("a", "a"), (7, "7"), (None, 1)])
def test_an_id_is_given_once(first, second):
    rows = reader()
    values = [{"prompt": "x"} | ({} if i is None else {"id": i}) for i in (first, second)]
    one, other = (rows.read(Line(n, json.dumps(v).encode())) for n, v in enumerate(values, 1))
    assert not isinstance(one.content, LocalspecError)
    assert isinstance(other.content, PromptError)
    assert re.search("is that of an earlier row", str(other.content))
    assert other.id is None  # else the answer to the first row could not be told from this error


def test_a_line_number_can_be_the_id_of_an_earlier_row():
    rows = reader()
    rows.read(Line(1, b'{"id": "2", "prompt": "x"}'))
    assert "line number 2 is the id of an earlier row; give it an id" in str(
        rows.read(Line(2, b'{"prompt": "x"}')).content
    )


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "x", "temperature": %s}',
        '{"prompt": "x", "draft_temperature": %s}',
        '{"prompt": "x", "logit_bias": %s}',
        '{"prompt": "x", "banned": %s}',
        '{"prompt": "x", "stop": %s}',
        '{"prompt": %s}',
        '{"id": %s, "prompt": "x"}',
        '{"messages": [{"role": %s, "content": "x"}]}',
        '{"messages": [{"role": "user", "content": %s}]}',
        '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": %s}}',
        '{"custom_id": "a", "method": "POST", "url": %s, "body": {}}',
    ],
)
def test_no_depth_of_nesting_is_too_much(row):
    """Near Python's limit JSON can still be read, and what is said of it some frames further down cannot."""
    rows = reader()
    limit = sys.getrecursionlimit()
    for depth in (3, 50, *range(limit - 150, limit + 10)):
        data = (row % ("[" * depth + "]" * depth)).encode()
        assert isinstance(rows.read(Line(depth, data)).content, LocalspecError)


@pytest.mark.parametrize(
    "row",
    [
        {"temperature": "x" * 100_000},
        {"temperature": 10**400},
        {"logit_bias": {"9" * 400: "x"}},
        {"logit_bias": {"9" * 2000: 1}},
        {"banned": [[1] * 50_000]},
        {"banned": {"x" * 100_000: 1}},
        {"rule": ["x"] * 50_000},
        {"sampler_order": "x y " * 50_000},
        {"x" * 50_000: 1},
        {"stop": [{"x" * 50_000: 1}]},
        {"seed": "1" * 50_000},
        {"id": ["x" * 50_000]},
        {"prompt": None, "messages": [{"role": "a b " * 50_000, "content": ""}]},
        {"prompt": None, "messages": [{"role": "user", "content": {"a b " * 50_000: 1}}]},
        openai({"tools": [{"x" * 50_000: 1}], "messages": []}),
    ],
    ids=range(15),
)
def test_a_message_shows_a_part_of_what_is_long(row):
    found = read(row if "custom_id" in row else {"prompt": "a"} | row).content
    assert isinstance(found, LocalspecError)
    assert len(str(found)) < 500


def test_many_banned_tokens_take_no_time():
    ids = [*range(200_000), 7]
    assert "names token 7 twice" in str(read({"prompt": "a", "banned": ids}).content)


def test_a_row_that_is_wrong_keeps_its_id():
    rows = reader()
    wrong = rows.read(Line(1, b'{"id": "a", "prompt": 5}'))
    assert wrong.id == "a"
    again = rows.read(Line(2, b'{"id": "a", "prompt": "x"}'))
    assert "earlier row" in str(again.content)


def test_the_system_text_goes_in_front_of_rows_that_bring_none():
    system, user = Message("system", "Be brief."), Message("user", "hello")
    assert request({"prompt": "hello"}, system="Be brief.").prompt == [system, user]
    messages = [{"role": "user", "content": "hello"}]
    assert request({"messages": messages}, system="Be brief.").prompt == [system, user]
    own = [{"role": "system", "content": "Rhyme."}, *messages]
    assert request({"messages": own}, system="Be brief.").prompt == [Message("system", "Rhyme."), user]
    assert request({"prompt": "hello", "raw": True}, system="Be brief.").prompt == "hello"


def test_messages_of_openai_files_are_understood():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Rhyme."}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "hello"},
    ]
    read = [Message("system", "Rhyme."), Message("assistant", ""), Message("user", "hello")]
    assert request({"messages": messages}, system="Be brief.").prompt == read


BAD = [
    (b"", "blank"),
    (b"  \t", "blank"),
    (b'{"prompt": "a"', "not JSON"),
    (b"hello", "not JSON"),
    (b'{"prompt": "a"} {"prompt": "b"}', "not JSON"),
    (b"[" * 100_000, "nested too deep|not JSON"),
    (b"\xff\xfe{", "not UTF-8"),
    (b'\xef\xbb\xbf{"prompt": "a"}', "begins with a byte order mark"),
    (b"[1, 2]", "no object"),
    (b'"text"', "no object"),
    (b"null", "no object"),
    (b"{}", "needs a prompt or messages"),
    (b'{"prompt": null}', "needs a prompt or messages"),
    (b'{"prompt": "a", "messages": []}', "has both"),
    (b'{"prompt": 5}', "must be a text"),
    (b'{"prompt": ["a"]}', "must be a text"),
    (b'{"messages": "a"}', "no messages"),
    (b'{"messages": []}', "no messages"),
    (b'{"messages": [5]}', "message 1"),
    (b'{"messages": [{"role": "user"}]}', "message 1"),
    (b'{"messages": [{"role": "wizard", "content": "a"}]}', "wizard"),
    (b'{"messages": [{"role": [], "content": "a"}]}', "role"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "must be text"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "not text"),
    (b'{"messages": [{"role": "user", "content": "a"}], "raw": true}', "leave out raw"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"id": "\\udfff", "prompt": "a"}', "surrogate"),
    (b'{"prompt": "a", "\\ud800": 1}', "surrogate"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    (b'{"prompt": "a", "temperature": -Infinity}', "Infinity"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf"),
    (b'{"prompt": "a", "temperature": 1%s}' % (b"0" * 400), "temperature is 1000"),
    (b'{"prompt": "a", "seed": 1%s}' % (b"0" * 5000), "not JSON: a number has 5001 digits$"),
    (b'{"prompt": "a", "temperature": "hot"}', "temperature is 'hot'"),
    (b'{"prompt": "a", "temperature": true}', "temperature is True"),
    (b'{"prompt": "a", "temperature": -1}', "temperature is -1"),
    (b'{"prompt": "a", "top_k": 1.5}', "top_k is 1.5"),
    (b'{"prompt": "a", "top_p": [1]}', "top_p"),
    (b'{"prompt": "a", "sampler_order": []}', "sampler_order"),
    (b'{"prompt": "a", "sampler_order": "random"}', "sampler_order"),
    (b'{"prompt": "a", "banned": 5}', "banned"),
    (b'{"prompt": "a", "banned": [[1]]}', "banned"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "token ids"),
    (b'{"prompt": "a", "logit_bias": {"1_0": 1}}', "token ids"),
    (b'{"prompt": "a", "logit_bias": {" 5": 1}}', "token ids"),
    ('{"prompt": "a", "logit_bias": {"٥": 1}}'.encode(), "token ids"),
    (b'{"prompt": "a", "logit_bias": {"5": 1, "05": 2}}', "names token 5 twice"),
    (b'{"prompt": "a", "logit_bias": {"5": "x"}}', "logit_bias"),
    (b'{"prompt": "a", "logit_bias": [[1]]}', "logit_bias"),
    (b'{"prompt": "a", "logit_bias": 5}', "logit_bias"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
    (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens is '5'"),
    (b'{"prompt": "a", "max_tokens": true}', "max_tokens is True"),
    (b'{"prompt": "a", "seed": 1.0}', "seed is 1.0"),
    (b'{"prompt": "a", "stop": 5}', "stop is 5"),
    (b'{"prompt": "a", "stop": [""]}', "stop string ''"),
    (b'{"prompt": "a", "stop": [[]]}', "stop is"),
    (b'{"prompt": "a", "rule": "best"}', "rule is 'best'"),
    (b'{"prompt": "a", "rule": []}', "rule"),
    (b'{"prompt": "a", "draft_temperature": "x"}', "draft_temperature"),
    (b'{"prompt": "a", "draft_temperature": -1}', "draft_temperature is -1"),
    (b'{"prompt": "a", "raw": 1}', "raw is 1"),
    (b'{"prompt": "a", "temprature": 1}', "no option 'temprature'"),
    (b'{"id": true, "prompt": "a"}', "id is True"),
    (b'{"id": 1.5, "prompt": "a"}', "id is 1.5"),
    (b'{"id": "", "prompt": "a"}', "id is ''"),
    (b'{"id": [1], "prompt": "a"}', "id is"),
    (None, "more than"),
]


@pytest.mark.parametrize(("data", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_row_says_what_is_wrong(data, message):
    row = reader().read(Line(3, data))
    assert isinstance(row.content, PromptError | InvalidOptionError)
    assert re.search(message, str(row.content))
    str(row.content).encode()  # it can be written


# OpenAI's shape


CHAT = {"model": "gpt-x", "messages": [{"role": "user", "content": "hello"}]}


def test_an_openai_request_is_taken():
    row = read(
        openai(
            CHAT
            | {
                "max_completion_tokens": 5,
                "temperature": 0,
                "top_p": 0.5,
                "frequency_penalty": 0.1,
                "presence_penalty": 0.2,
                "logit_bias": {"7": -100},
                "seed": 3,
                "stop": ["a", "b"],
                "n": 1,
                "stream": False,
                "user": "me",
                "response_format": {"type": "text"},
                "tools": None,
            }
        )
    )
    assert (row.id, row.model) == ("a", "gpt-x")
    found = row.content
    assert found.prompt == [Message("user", "hello")]
    assert found.params == SamplingParams(
        temperature=0, top_k=40, top_p=0.5, frequency_penalty=0.1, presence_penalty=0.2, logit_bias={7: -100}
    )
    assert (found.max_tokens, found.seed, found.stop, found.raw) == (5, 3, ("a", "b"), False)


def test_what_programs_write_as_null_is_left_out():
    nulls = ("prompt", "max_completion_tokens", "stop", "stream_options", "reasoning_effort", "seed", "temperature")
    found = request(openai({**CHAT, "max_tokens": 5, **dict.fromkeys(nulls), "parallel_tool_calls": True}))
    assert found == request(openai(CHAT | {"max_tokens": 5}))
    assert request(openai(CHAT | {"penalty_last_n": None})).params.penalty_last_n is None
    assert request(openai(CHAT | {"max_tokens": 5, "max_completion_tokens": 5})).max_tokens == 5


def test_an_openai_completion_is_a_raw_prompt():
    found = request(openai({"prompt": "hello", "max_tokens": 2}, url="/v1/completions"), system="Be brief.")
    assert (found.prompt, found.raw, found.max_tokens) == ("hello", True, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (openai(CHAT, extra=1), "extra"),
        (openai(CHAT, method="GET"), "method"),
        (openai(CHAT, url="/v1/embeddings"), "url"),
        (openai(CHAT, url=[]), "url"),
        (openai([]), "body"),
        ({"custom_id": "a"}, "body"),
        (openai({"prompt": "a"}), "takes messages"),
        (openai({"messages": []}, url="/v1/completions"), "takes prompt"),
        (openai(CHAT | {"n": 2}), "n is 2"),
        (openai(CHAT | {"n": True}), "n is True"),
        (openai(CHAT | {"stream": True}), "stream is True"),
        (openai(CHAT | {"logprobs": True}), "logprobs"),
        (openai(CHAT | {"tools": [{"type": "function"}]}), "tools"),
        (openai(CHAT | {"response_format": {"type": "json_object"}}), "response_format"),
        (openai(CHAT | {"frobnicate": 1}), "frobnicate"),
        (openai(CHAT | {"id": 1}), "no option 'id'"),
        (openai(CHAT | {"max_tokens": 5, "max_completion_tokens": 6}), "max_tokens and max_completion_tokens differ"),
        (openai(CHAT, custom_id=5.5), "custom_id is 5.5"),
    ],
)
def test_a_bad_openai_request_says_what_is_wrong(values, message):
    row = read(values)
    assert isinstance(row.content, PromptError | InvalidOptionError)
    assert message in str(row.content)
