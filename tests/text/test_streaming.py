"""Streamed text equals the text as a whole, however it is cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.errors import InvalidOptionError
from localspec.text import IncrementalDecoder, StopStrings


def cut(data, places):
    """Cut ``data`` at the given places, in any order and with repetition."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


places = st.lists(st.integers(0, 1000), max_size=12)
emoji = "👩🏽\u200d🚀 🇨🇭 日本語 e\u0301 ﷽"


def decode(pieces):
    decoder = IncrementalDecoder()
    return "".join(map(decoder.feed, pieces)) + decoder.flush()


class TestIncrementalDecoder:
    @settings(deadline=None)
    @given(st.text() | st.just(emoji), places)
    def test_text_comes_back_whole(self, text, where):
        decoder = IncrementalDecoder()
        parts = [decoder.feed(piece) for piece in cut(text.encode("utf-8"), where)]
        assert "".join(parts) == text
        assert decoder.flush() == ""

    @settings(deadline=None)
    @given(st.binary() | st.lists(st.sampled_from("🚀é\xff".encode() + b"\xff")).map(bytes), places)
    def test_any_bytes_equal_decoding_at_once(self, data, where):
        assert decode(cut(data, where)) == data.decode("utf-8", errors="replace")

    def test_byte_by_byte_shows_no_part_of_a_character(self):
        decoder = IncrementalDecoder()
        shown = [decoder.feed(bytes([byte])) for byte in "🚀".encode()]
        assert shown == ["", "", "", "🚀"]

    def test_a_cut_character_is_marked_at_the_end_only(self):
        decoder = IncrementalDecoder()
        assert decoder.feed("ok🚀".encode()[:-1]) == "ok"
        assert decoder.flush() == "\ufffd"
        assert decoder.feed(b"new") == "new"


def run(stops, pieces):
    machine = StopStrings(stops)
    shown, matched = [], None
    for piece in pieces:
        result = machine.feed(piece)
        shown.append(result.text)
        if result.stopped:
            matched = result.matched
            break
    shown.append(machine.flush())
    return "".join(shown), matched


def whole(stops, text):
    """Read one more character at a time until a stop string is complete."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text(alphabet="ab\n", max_size=25)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4)


class TestStopStrings:
    @settings(deadline=None)
    @given(stop_lists, letters, places)
    def test_equals_the_text_as_a_whole(self, stops, text, where):
        assert run(stops, cut(text, where)) == whole(stops, text)

    @settings(deadline=None)
    @given(stop_lists, letters, places)
    def test_shows_as_early_as_possible(self, stops, text, where):
        machine = StopStrings(stops)
        seen = shown = ""
        for piece in cut(text, where):
            seen += piece
            result = machine.feed(piece)
            shown += result.text
            if result.stopped:
                break
            held = seen[len(shown) :]
            assert seen == shown + held
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)

    def test_without_stop_strings_nothing_waits(self):
        assert StopStrings().feed("text").text == "text"

    def test_near_match_is_released(self):
        machine = StopStrings(["</answer>"])
        assert [machine.feed(piece).text for piece in ("</ans", "w", "ering")] == ["", "", "</answering"]

    def test_near_match_inside_a_near_match(self):
        machine = StopStrings(["aab"])
        assert [machine.feed(piece).text for piece in "aaab"] == ["", "", "a", ""]
        assert machine.feed("more").stopped

    def test_first_complete_wins_and_longest_among_those(self):
        assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
        assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")

    def test_a_long_stop_string(self):
        stop = "x" * 20_000 + "!"
        assert run([stop], ["a" + "x" * 20_000, "!tail"]) == ("a", stop)

    def test_after_the_stop_everything_is_dropped(self):
        machine = StopStrings(["."])
        assert machine.feed("one. two").text == "one"
        assert machine.feed(" three").text == ""
        assert machine.flush() == ""

    @pytest.mark.parametrize("stops", [[""], ["a", ""], [1], "stop"])
    def test_refuses(self, stops):
        with pytest.raises(InvalidOptionError, match="stop string"):
            StopStrings(stops)
