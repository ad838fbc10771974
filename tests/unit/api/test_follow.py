from __future__ import annotations

import json

import pytest
from headrace.contract import JobStatus
from headrace.events import StateEvent, TokenEvent, job_event
from headrace.sse import EventDecoder
from hypothesis import given
from hypothesis import strategies as st

from api.follow import frame, is_stream_id


@pytest.mark.parametrize("text", ["0-0", "1760000000000-12", f"{2**64 - 1}-{2**64 - 1}"])
def test_ids_that_redis_takes(text: str) -> None:
    assert is_stream_id(text)


@pytest.mark.parametrize(
    "text", ["", "0", "0-", "-0", "1-2-3", f"{2**64}-0", f"0-{2**64}", "1-1\n", "+", "\u0663-\u0663"]
)
def test_ids_that_redis_does_not_take(text: str) -> None:
    assert not is_stream_id(text)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_a_frame_and_any_line_splitting(text: str) -> None:
    event = TokenEvent(attempt=1, offset=0, text=text)
    wire = frame(event, "1-0")
    ((event_id, data),) = EventDecoder().feed(wire)
    assert (event_id, job_event.validate_json(data)) == ("1-0", event)
    lines = wire.decode().splitlines()
    assert len(lines) == 4
    assert json.loads(lines[2].removeprefix("data: "))["text"] == text


def test_an_event_without_an_id_does_not_move_the_readers_position() -> None:
    assert frame(StateEvent(status=JobStatus.QUEUED), None).startswith(b"event: state\n")
