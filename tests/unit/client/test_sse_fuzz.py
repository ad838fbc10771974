"""Bytes of any kind where events should be: the decoder takes them all, however they are cut."""

from __future__ import annotations

from contextlib import suppress

import pytest
from headrace.errors import HeadraceError
from headrace.sse import EventDecoder, EventReader
from hypothesis import given
from hypothesis import strategies as st

line = st.sampled_from(
    [b"data: ", b"id: 1-0", b"event: token", b"\n", b"\r\n", b":", b"\n\n", b'{"event":"state"}']
) | (st.binary(max_size=6))
streams = st.lists(line, max_size=20).map(b"".join)


@given(streams, st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_how_a_stream_is_cut_changes_nothing(stream: bytes, sizes: list[int]) -> None:
    whole, pieces = EventDecoder(), EventDecoder()
    expected = whole.feed(stream)
    found, at, turn = [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        found += pieces.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == expected


@given(streams)
def test_a_reader_takes_an_event_or_says_what_it_is(stream: bytes) -> None:
    with suppress(HeadraceError):
        EventReader("j", None).feed(stream)


def test_an_event_of_another_version_is_a_clear_error() -> None:
    with pytest.raises(HeadraceError, match="does not know"):
        EventReader("j", None).feed(b'data: {"event":"later"}\n\n')
