"""Prompts as token ids: as llama.cpp itself would cut the template's text, and safe from what people type."""

from types import MappingProxyType

import pytest

from localspec.encoding import PromptEncoder
from localspec.session import load_pair
from localspec.text import ChatTemplate, Message, template_source

CONVERSATIONS = [
    [Message("user", "Hi")],
    [
        Message("system", "  Be brief."),
        Message("user", " two  spaces \n\nx"),
        Message("assistant", "Yo.\n"),
        Message("user", "👩🏽‍🚀 日本語\t\ttabs"),
    ],
    [Message("user", "a"), Message("assistant", ""), Message("user", "   b")],
]
MODELS = [
    ("smollm2_path", None),
    ("smollm2_path", "llama3"),
    ("smollm2_path", "mistral"),
    ("qwen_draft_path", None),
    ("gemma_path", "gemma"),
]


@pytest.fixture(scope="module")
def open_model(request):
    opened = {}

    def open_model(path, template):
        if (path, template) not in opened:
            file = request.getfixturevalue(path)
            opened[path, template] = load_pair(target=file, context=64, threads=1, template=template)
        return opened[path, template]

    yield open_model
    for session in opened.values():
        session.close()


@pytest.mark.model
@pytest.mark.parametrize(("path", "template"), MODELS)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_honest_messages_are_cut_as_the_whole_prompt_would_be(path, template, messages, open_model):
    session = open_model(path, template)
    vocabulary = session.vocabulary
    source = template_source(template, session.pair.target_header.chat_template)
    markers = [
        vocabulary.marker(i) if i is not None else "" for i in (vocabulary.bos, session.pair.target_header.eos_id)
    ]
    text = ChatTemplate(source, bos_token=markers[0], eos_token=markers[1]).render(messages).text
    whole = vocabulary.tokenize(text, control=True)
    if vocabulary.adds_bos and whole[:1] != [vocabulary.bos]:
        whole.insert(0, vocabulary.bos)
    tokens = session.encode(messages)
    assert tokens == whole
    if vocabulary.adds_bos:
        assert tokens[0] == vocabulary.bos
        assert vocabulary.bos not in tokens[1:]
    raw = session.encode("Hi", raw=True)
    assert (raw[0] == vocabulary.bos) is vocabulary.adds_bos


@pytest.mark.model
@pytest.mark.parametrize(("path", "template"), MODELS)
def test_no_marker_that_people_type_becomes_a_control_token(path, template, open_model):
    session = open_model(path, template)
    control = session.vocabulary.control_tokens
    forged = "\n".join(list(control)[:200])
    honest, attacked = (
        [token for token in session.encode([Message("user", text)]) if token in set(control.values())]
        for text in ("x", forged)
    )
    assert attacked == honest


@pytest.mark.model
def test_a_marker_of_the_template_that_is_no_control_token_is_cut_as_well(open_model):
    session = open_model("qwen_draft_path", None)
    assert "<tool_call>" in session.vocabulary.user_defined_tokens
    (token,) = session.vocabulary.tokenize("<tool_call>")
    tokens = session.encode([Message("user", "a <tool_call> b")])
    assert token not in tokens
    assert "a <tool_call> b" in b"".join(map(session.vocabulary.piece, tokens)).decode()


class Letters:
    """A vocabulary in which every character is a token, and control tokens swallow the space after them."""

    bos, adds_bos = 1, True
    control_tokens = MappingProxyType({"<s>": 1, "<|user|>": 2, "<|end|>": 3})
    user_defined_tokens = frozenset()

    def tokenize(self, text, *, control=False):
        return [ord(character) for character in text]

    def swallows_space(self, token):
        return token == 2


def test_space_after_a_control_token_that_swallows_it():
    template = ChatTemplate("<s>{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}")
    encoder = PromptEncoder(Letters(), template, name="x")
    assert encoder.encode([Message("user", " a b ")]) == [1, 2, *map(ord, "a b "), 3, ord("\n")]
