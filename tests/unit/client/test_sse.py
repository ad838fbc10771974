from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime

import pytest
from headrace.contract import Job, JobResult, JobStatus, Priority
from headrace.errors import ConnectionFailed, HeadraceError, JobFailed, JobTimeout
from headrace.events import StateEvent, TokenEvent
from headrace.sse import OUTAGE_S, EventDecoder, EventReader, TextReader
from hypothesis import given
from hypothesis import strategies as st


def job(text: str = "", status: JobStatus = JobStatus.SUCCEEDED) -> Job:
    now = datetime(2031, 1, 1, tzinfo=UTC)
    result = JobResult(text=text)
    return Job(id="j", model="m", status=status, priority=Priority.HIGH, tenant="t", created_at=now, result=result)


def end(text: str, status: JobStatus = JobStatus.SUCCEEDED) -> StateEvent:
    return StateEvent(status=status, job=job(text, status))


def token(offset: int, text: str, attempt: int = 1) -> TokenEvent:
    return TokenEvent(attempt=attempt, offset=offset, text=text)


RUNNING = StateEvent(status=JobStatus.RUNNING, attempt=1)


class TestEventDecoder:
    def test_events_comments_and_unknown_fields(self) -> None:
        wire = b": hello\n\nid: 1-0\nevent: token\ndata: {}\n\nretry: 9\ndata: a\ndata: b\n\n"
        assert EventDecoder().feed(wire) == [("1-0", "{}"), (None, "a\nb")]

    def test_carriage_returns_are_part_of_the_line_end(self) -> None:
        assert EventDecoder().feed(b"id: 7\r\ndata: x\r\n\r\n") == [("7", "x")]

    def test_only_line_feeds_end_lines(self) -> None:
        text = "a\u2028b\x85c\x0bd"
        assert EventDecoder().feed(f"data: {text}\n\n".encode()) == [(None, text)]

    def test_an_unfinished_event_is_not_given(self) -> None:
        assert EventDecoder().feed(b"id: 1\ndata: x\n") == []

    @given(st.lists(st.integers(0, 60)))
    def test_chunks_may_be_cut_anywhere(self, cuts: list[int]) -> None:
        wire = 'id: 1-0\ndata: {"text":"\u20ac \U0001f600"}\n\n: k\n\nid: 2-0\ndata: y\n\n'.encode()
        marks = sorted({0, len(wire), *(c for c in cuts if c < len(wire))})
        decoder = EventDecoder()
        found = [e for a, b in itertools.pairwise(marks) for e in decoder.feed(wire[a:b])]
        assert found == EventDecoder().feed(wire)


class TestTextReader:
    def read(self, *events: StateEvent | TokenEvent) -> list[str]:
        reader = TextReader("j")
        return [piece for event in events if (piece := reader.take(event))]

    def test_pieces_in_order(self) -> None:
        assert self.read(RUNNING, token(0, "ab"), token(2, "c"), end("abc")) == ["ab", "c"]

    def test_what_was_given_before_is_skipped_when_an_attempt_starts_again(self) -> None:
        events = [token(0, "abc"), RUNNING, token(0, "a", 2), token(1, "bcd", 2), token(4, "e", 2), end("abcde")]
        assert self.read(*events) == ["abc", "d", "e"]

    def test_after_a_gap_the_rest_comes_with_the_end(self) -> None:
        assert self.read(token(0, "ab"), token(5, "f"), end("abcdef")) == ["ab", "cdef"]

    def test_of_several_completions_it_reads_the_first(self) -> None:
        other = TokenEvent(attempt=1, offset=0, text="other", index=1)
        assert self.read(RUNNING, other, token(0, "ab"), other, token(2, "c"), end("abc")) == ["ab", "c"]

    def test_without_tokens_the_text_comes_with_the_end(self) -> None:
        assert self.read(RUNNING, end("whole")) == ["whole"]

    def test_another_text_than_the_streamed_one_is_an_error(self) -> None:
        with pytest.raises(HeadraceError, match="not the one that was streamed"):
            self.read(token(0, "ab"), end("xyz"))

    @pytest.mark.parametrize("status", [JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED])
    def test_an_end_without_success_is_raised(self, status: JobStatus) -> None:
        with pytest.raises(JobFailed) as caught:
            self.read(token(0, "ab"), end("ab", status))
        assert caught.value.job.status is status

    @given(st.text(max_size=40), st.data())
    def test_any_mixture_of_replays_gives_the_text(self, text: str, data: st.DataObject) -> None:
        events: list[StateEvent | TokenEvent] = []
        for attempt in range(data.draw(st.integers(1, 4))):
            events.append(RUNNING)
            at, stop = 0, data.draw(st.integers(0, len(text)))
            while at < stop:
                size = data.draw(st.integers(1, stop - at))
                events.append(token(at, text[at : at + size], attempt))
                at += size
        assert "".join(self.read(*events, end(text))) == text


class TestEventReader:
    def frame(self, event: StateEvent | TokenEvent, event_id: str | None = None) -> bytes:
        head = f"id: {event_id}\n" if event_id else ""
        return f"{head}data: {event.model_dump_json()}\n\n".encode()

    def test_a_server_that_stays_away_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s = 1000.0
        monkeypatch.setattr("headrace.sse.time.monotonic", lambda: now_s)
        reader = EventReader("a", None)
        now_s += 2 * OUTAGE_S  # it read nothing meanwhile, and the server has done nothing wrong
        assert reader.pause_s() > 0
        now_s += 0.9 * OUTAGE_S
        assert reader.pause_s() > 0
        reader.feed(b": still here\n\n")
        now_s += 2 * OUTAGE_S
        assert reader.pause_s() > 0
        now_s += 1.1 * OUTAGE_S
        with pytest.raises(ConnectionFailed, match="of job a for 66 s; it goes on"):
            reader.pause_s()

    def test_it_asks_for_what_comes_after_the_last_id(self) -> None:
        reader = EventReader("a/b", None)
        assert reader.request().path == "/v1/jobs/a%2Fb/events"
        assert "Last-Event-ID" not in reader.request().headers
        reader.feed(self.frame(token(0, "x"), "5-1") + self.frame(RUNNING))
        assert reader.request().headers["Last-Event-ID"] == "5-1"

    def test_half_an_event_of_a_lost_connection_is_forgotten(self) -> None:
        reader = EventReader("j", None)
        reader.feed(b'id: 9-9\ndata: {"event"')
        assert "Last-Event-ID" not in reader.request().headers
        assert reader.feed(self.frame(RUNNING)) == [RUNNING]

    def test_a_terminal_event_ends_it(self) -> None:
        reader = EventReader("j", None)
        assert reader.feed(self.frame(end("x")) + self.frame(RUNNING)) == [end("x")]
        assert reader.done

    def test_an_event_of_another_version_is_an_error(self) -> None:
        with pytest.raises(HeadraceError):
            EventReader("j", None).feed(b"data: " + json.dumps({"event": "new"}).encode() + b"\n\n")

    def test_it_gives_up_at_its_deadline(self) -> None:
        reader = EventReader("j", 0.0)
        with pytest.raises(JobTimeout):
            reader.pause_s()
        with pytest.raises(JobTimeout):
            reader.feed(b"")
