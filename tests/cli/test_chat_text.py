"""Text out of blocks of tokens: whole characters, and stop strings wherever they fall."""

import random

import pytest

from localspec.backend.llamacpp import LlamaModel
from localspec.sampling import SamplingParams
from tests.cli.scripted import PROMPT, scripted_session

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0)
TEXTS = {
    "emoji": "Family 👨‍👩‍👧‍👦, astronaut 👩🏽‍🚀, flags 🇩🇪🇯🇵🏴󠁧󠁢󠁥󠁮󠁧󠁿, ☺️ and 🫠.",
    "CJK": "人工知能は世界を変える。日本語、中文、한국어를 섞어서。",
    "indentation": "if x:\n" + " " * 200 + "return 1\n" + "\t" * 30 + "# end\n",
    "combining": "e\u0301 a\u0308\u0323 ก็ی\u200cک 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u202eabc\u202c",
}


@pytest.fixture(scope="module")
def vocabulary(smollm2_path):
    model = LlamaModel(smollm2_path)
    yield model.vocabulary
    model.close()


@pytest.fixture(scope="module")
def end(vocabulary):
    return vocabulary.control_tokens["<|im_end|>"]


def stream(session, **options):
    return session.stream(PROMPT, GREEDY, raw=True, **options)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
def test_streamed_text_is_the_text_decoded_at_once(name, gamma, vocabulary, end):
    script = vocabulary.tokenize(TEXTS[name])
    wrong = random.Random(name).sample(range(len(script)), len(script) // 4)
    running = stream(scripted_session(vocabulary, end, script, wrong_at=wrong), num_draft_tokens=gamma)
    texts = [event.text for event in running]
    assert "".join(texts) == TEXTS[name] == running.result().text
    assert running.result().tokens == [*script, end]
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_character_cut_by_the_end_is_one_replacement_mark(gamma, vocabulary, end):
    script = vocabulary.tokenize("ok 🫠")
    assert len(vocabulary.piece(script[-1])) < 4, "the last token is only a part of the character"
    session = scripted_session(vocabulary, end, script[:-1])
    assert session.generate(PROMPT, GREEDY, raw=True, num_draft_tokens=gamma).text == "ok \ufffd"


LEAD = "One two three four five six seven eight nine"
STOPS = ["\n", "###", "END OF TEXT", "<|im_end|>", "🫠!", "。終わり", "stop here please"]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("offset", range(6))
def test_nothing_of_a_stop_string_is_shown(stop, offset, vocabulary, end):
    """At each offset in a block of γ + 1 tokens, in text whose tokens do not end where the stop string begins."""
    lead = " ".join(LEAD.split()[: 3 + offset]) + " "
    script = vocabulary.tokenize(f"{lead}{stop} and what follows")
    for gamma in (0, 2, 4):
        running = stream(scripted_session(vocabulary, end, script), num_draft_tokens=gamma, stop=[stop])
        texts = [event.text for event in running]
        result = running.result()
        assert "".join(texts) == result.text == lead
        assert result.finish_reason == "stop"
        assert result.tokens == script[: len(result.tokens)], "what came after is no part of the answer"
        assert stop in vocabulary_text(vocabulary, result.tokens)
        assert stop not in vocabulary_text(vocabulary, result.tokens[:-1])


def vocabulary_text(vocabulary, tokens):
    return b"".join(map(vocabulary.piece, tokens)).decode(errors="replace")


@pytest.mark.parametrize("gamma", [0, 2, 4])
def test_what_only_began_like_a_stop_string_is_shown(gamma, vocabulary, end):
    text = "a ## b #### c END OF T END OF TEX\nEN"
    script = vocabulary.tokenize(text)
    stops = ["#####", "END OF TEXT", "\n\n"]
    running = stream(scripted_session(vocabulary, end, script), num_draft_tokens=gamma, stop=stops)
    assert "".join(event.text for event in running) == text


@pytest.mark.parametrize("length", range(1, 6))
def test_stop_strings_of_one_to_five_tokens(length, vocabulary, end):
    words = [" alpha", " beta", " gamma", " delta", " omega"]
    for offset in range(6):
        tokens = vocabulary.tokenize("Go" + " on" * offset)
        marker = [token for word in words for token in vocabulary.tokenize(word)][:length]
        stop = vocabulary_text(vocabulary, marker)
        session = scripted_session(vocabulary, end, [*tokens, *marker, *vocabulary.tokenize(" not this")])
        result = session.generate(PROMPT, GREEDY, raw=True, num_draft_tokens=4, stop=[stop])
        assert result.text == "Go" + " on" * offset
        assert result.tokens == [*tokens, *marker]
