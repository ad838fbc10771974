from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from text.stop import StopMatcher

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """What is let through piece by piece (and at the end, if nothing fired), and what fired."""
    shown = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


def naive(text: str, stops: list[str], include: bool, armed_from: int = 0) -> tuple[str, str | None]:
    """The same by trying every end in the text."""
    for end in range(armed_from + 1, len(text) + 1):
        hits = sorted((stop for stop in stops if text[:end].endswith(stop)), key=len)
        if hits:
            return text[: end if include else end - len(hits[-1])], hits[-1]
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    ends = [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(text=LETTERS, cuts=st.lists(st.integers(0, 30), max_size=12), stops=STOPS, include=st.booleans())
@example(text="abab\n", cuts=[1, 2, 3, 4], stops=["ab\n"], include=False)
def test_equals_a_search_of_the_whole_text(text: str, cuts: list[int], stops: list[str], include: bool) -> None:
    shown, stop = feed(StopMatcher(stops, include), pieces_of(text, cuts))
    assert ("".join(shown), stop) == naive(text, stops, include)


@given(text=LETTERS, cuts=st.lists(st.integers(0, 30), max_size=12), stops=STOPS)
def test_holds_back_only_the_longest_end_that_may_become_a_stop(text: str, cuts: list[int], stops: list[str]) -> None:
    """https://github.com/vllm-project/vllm/issues/11089"""
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces_of(text, cuts):
        let_through, stop = matcher.push(piece)
        if stop is not None:
            return
        seen += piece
        shown += let_through
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        held = max(len(beginning) for beginning in beginnings if seen.endswith(beginning))
        assert shown == seen[: len(seen) - held]


@given(before=LETTERS, after=LETTERS, cuts=st.lists(st.integers(0, 30), max_size=6), stops=STOPS)
def test_a_stop_fires_only_where_it_is_complete_once_armed(
    before: str, after: str, cuts: list[int], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece, armed=False).text for piece in pieces_of(before, cuts))
    rest, stop = feed(matcher, pieces_of(after, cuts))
    assert (shown + "".join(rest), stop) == naive(before + after, stops, include=False, armed_from=len(before))


def test_a_stop_may_begin_and_end_inside_a_token() -> None:
    """https://github.com/vllm-project/vllm/issues/3572"""
    assert feed(StopMatcher(["END"]), ["so the END. More"]) == (["so the "], "END")
    assert feed(StopMatcher(["END"], include=True), ["so the END. More"]) == (["so the END"], "END")


def test_a_stop_that_spans_tokens_leaks_no_part_of_itself() -> None:
    """https://github.com/vllm-project/vllm/issues/3672"""
    assert feed(StopMatcher(["\nUser:"]), ["Hi", ".\n", "Us", "er", ": you"]) == (["Hi", ".", "", "", ""], "\nUser:")


def test_a_stop_that_is_never_complete_is_shown_at_the_end() -> None:
    """https://github.com/ggml-org/llama.cpp/issues/9867"""
    assert feed(StopMatcher(["</answer>"]), ["42", "</", "ans"]) == (["42", "", "", "</ans"], None)


def test_text_that_cannot_become_a_stop_is_not_held() -> None:
    """https://github.com/vllm-project/vllm/issues/11089"""
    assert feed(StopMatcher(["x" * 1000]), ["hello ", "world"]) == (["hello ", "world", ""], None)
    assert feed(StopMatcher(["abcdefgh"]), ["1234ab", "c5", "6a"]) == (["1234", "abc5", "6", "a"], None)


def test_of_two_stops_that_end_together_the_longer_fires() -> None:
    assert feed(StopMatcher(["b", "ab"]), ["xa", "b"]) == (["x", ""], "ab")


def test_the_stop_that_is_complete_first_fires() -> None:
    assert feed(StopMatcher(["abcd", "bc"]), ["abcd"]) == (["a"], "bc")


def test_no_stops_let_everything_through() -> None:
    assert feed(StopMatcher([]), ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


class TestFits:
    """A stop that would cut the text where it may not end is ordinary text."""

    def test_the_first_stop_that_fits_fires(self) -> None:
        matcher = StopMatcher(["}"])
        balanced = lambda text: text.count("{") == text.count("}") + 1  # noqa: E731
        assert feed_fitting(matcher, ["{a{b", "}c", "}d"], balanced) == ("{a{b}c", "}")

    def test_with_the_stop_included_it_counts_as_kept(self) -> None:
        matcher = StopMatcher(["}"], include=True)
        assert feed_fitting(matcher, ["{{}", "}x"], lambda text: text == "{{}}") == ("{{}}", "}")

    def test_none_that_fits_leaves_the_text_whole(self) -> None:
        assert feed_fitting(StopMatcher(["ab"]), ["xa", "ba", "b"], lambda _text: False) == ("xabab", None)

    @given(text=LETTERS, cuts=st.lists(st.integers(0, 30), max_size=12), stops=STOPS, least=st.integers(0, 30))
    def test_equals_a_search_from_where_it_fits(self, text: str, cuts: list[int], stops: list[str], least: int) -> None:
        found = feed_fitting(StopMatcher(stops), pieces_of(text, cuts), lambda kept: len(kept) >= least)
        expected: tuple[str, str | None] = (text, None)
        for end in range(len(text), 0, -1):
            for stop in sorted(stops, key=len):
                if text[:end].endswith(stop) and end - len(stop) >= least:
                    expected = (text[: end - len(stop)], stop)
        assert found == expected


def feed_fitting(matcher: StopMatcher, pieces: list[str], fits: Callable[[str], bool]) -> tuple[str, str | None]:
    """The whole text, and what fired; `fits` sees everything that would be kept."""
    shown = ""
    for piece in pieces:
        before = shown
        text, stop = matcher.push(piece, fits=lambda kept, before=before: fits(before + kept))
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None
