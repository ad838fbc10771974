"""What one worker tells of a job, another one reads back: from a real broker, and from streams that are torn."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from headrace.contract import JobStatus
from headrace.events import StateEvent, TokenEvent
from headrace.wire import progress_key, stream_key

from engine.request import Progress, TokenDelta, TokenLogprob, TopLogprob
from tests.conftest import Broker
from worker import job_stream
from worker.job_stream import JobStream, Outgoing, tell_state
from worker.progress import Entry, Found, ProgressReader, Question, found_in

SCORE = TokenLogprob(
    97, "a", b"a", -0.125, 1, (TopLogprob(97, "a", b"a", -0.125), TopLogprob(255, "\ufffd", b"\xff", -3.0))
)


def running(attempt: int, at_s: float = 0.0, revision: str | None = "r1") -> Entry:
    return at_s, StateEvent(status=JobStatus.RUNNING, attempt=attempt, revision=revision)


def tokens(attempt: int, position: int | None, *token_ids: int, index: int = 0, at_s: float = 1.0) -> Entry:
    return at_s, TokenEvent(
        attempt=attempt, offset=0, text="", token_ids=list(token_ids), index=index, position=position
    )


def known(*entries: Entry) -> list[int]:
    found = found_in(entries, "r1")
    return list(found.progress[0].token_ids) if found is not None else []


class TestFound:
    def test_is_every_token_of_an_attempt(self) -> None:
        found = found_in([running(1, 5.0), tokens(1, 0, 7, at_s=6.0), tokens(1, 1, 8, 9, at_s=8.0)], "r1")
        assert found == Found((Progress((7, 8, 9)),), began_s=5.0, first_token_s=6.0)

    def test_ends_where_something_is_missing(self) -> None:
        assert known(running(1), tokens(1, 0, 7), tokens(1, 2, 9), tokens(1, 3, 10)) == [7]

    def test_counts_what_was_told_twice_once(self) -> None:
        assert known(running(1), tokens(1, 0, 7), tokens(1, 1, 8), tokens(1, 0, 7), tokens(1, 1, 8, 9)) == [7, 8, 9]

    def test_is_nothing_without_the_beginning(self) -> None:
        """The broker was emptied while the job ran."""
        assert known(tokens(1, 40, 7), tokens(1, 41, 8)) == []
        assert found_in([running(1)], "r1") is None

    def test_is_of_the_attempt_that_got_farthest(self) -> None:
        """One that was killed before it could repeat what it went on from says less than the one before it."""
        assert known(running(1), tokens(1, 0, 7, 8), running(2)) == [7, 8]
        assert known(running(1), tokens(1, 0, 7), running(2), tokens(2, 0, 7), tokens(2, 1, 8)) == [7, 8]

    def test_keeps_a_late_riser_out_of_its_successors_tokens(self) -> None:
        assert known(running(1), tokens(1, 0, 7), running(2), tokens(2, 0, 7), tokens(1, 1, 99), tokens(2, 1, 8)) in (
            [7, 99],
            [7, 8],
        )
        entries = [running(1), tokens(1, 0, 7), running(2), tokens(2, 0, 7), tokens(1, 1, 99), tokens(2, 1, 8, 9)]
        assert known(*entries) == [7, 8, 9]

    def test_is_nothing_of_another_model(self) -> None:
        assert known(running(1, revision="r0"), tokens(1, 0, 7)) == []
        assert known(running(1, revision=None), tokens(1, 0, 7)) == []
        assert known(running(1, revision="r0"), tokens(1, 0, 7, 8), running(2), tokens(2, 0, 5)) == [5]

    def test_is_nothing_of_before_the_job_ended(self) -> None:
        """A retry begins anew."""
        ended = (2.0, StateEvent(status=JobStatus.CANCELLED, attempt=1))
        assert known(running(1), tokens(1, 0, 7), ended) == []
        assert known(running(1), tokens(1, 0, 7), ended, running(1), tokens(1, 0, 5)) == [5]

    def test_is_nothing_of_a_version_that_counted_no_tokens(self) -> None:
        assert known(running(1), tokens(1, None, 7)) == []

    def test_tells_completions_apart(self) -> None:
        found = found_in([running(1), tokens(1, 0, 7, index=1), tokens(1, 0, 5), tokens(1, 1, 8, index=1)], "r1")
        assert found is not None
        assert found.progress == (Progress((5,)), Progress((7, 8), index=1))


@pytest.fixture
def client(broker_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(broker_url) as client:
        yield client


@pytest.fixture
def ask(broker_url: str) -> Iterator[Callable[..., Found | None]]:
    reader = ProgressReader(redis.Redis.from_url(broker_url))
    reader.start()

    def ask(job_id: str, streams: bool) -> Found | None:
        answer: queue.SimpleQueue[Found | None] = queue.SimpleQueue()
        reader.read(Question(job_id, streams, "r1"), answer.put)
        return answer.get(timeout=5)

    yield ask
    reader.stop()


def tell(client: redis.Redis, stream: JobStream, steps: int, **fields: Any) -> None:
    out = Outgoing()
    stream.begin(out, "r1", 0.0)
    for n in range(steps):
        stream.tokens(out, TokenDelta("a", "x", n, (n,), 0, n, **fields), time.monotonic())
    out.send(client)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("scores", [(), (SCORE,)])
def test_what_was_told_is_found(
    client: redis.Redis, ask: Callable[..., Found | None], streams: bool, scores: tuple[TokenLogprob, ...]
) -> None:
    stream = JobStream("a", 1, streams)
    tell(client, stream, 5, logprobs=scores)
    out = Outgoing()
    stream.save(out)
    out.send(client)
    found = ask("a", streams)
    assert found is not None
    assert found.progress == (Progress((0, 1, 2, 3, 4), scores * 5),)
    assert time.monotonic() - 5 < found.began_s <= found.first_token_s <= time.monotonic() + 0.1


def test_a_job_that_does_not_stream_shows_its_readers_no_tokens(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_stream, "SAVE_S", 1000.0)
    stream = JobStream("a", 1, streams=False)
    tell(client, stream, 50)
    assert client.xlen(stream_key("a")) == 1
    assert client.xlen(progress_key("a")) == 2, "its beginning, and its first token at once"
    out = Outgoing()
    stream.save(out)
    stream.save(out)
    out.send(client)
    assert client.xlen(progress_key("a")) == 3, "49 tokens in one entry"
    out = Outgoing()
    stream.end(out, JobStatus.SUCCEEDED)
    tell_state(out, "a", 1, JobStatus.SUCCEEDED)
    out.send(client)
    assert not client.exists(progress_key("a"))


def test_a_job_that_is_handed_back_keeps_its_progress(client: redis.Redis, ask: Callable[..., Found | None]) -> None:
    stream = JobStream("a", 1, streams=False)
    tell(client, stream, 3)
    out = Outgoing()
    stream.save(out)
    stream.end(out, JobStatus.QUEUED)
    tell_state(out, "a", 1, JobStatus.QUEUED)
    out.send(client)
    found = ask("a", False)
    assert found is not None
    assert found.progress[0].token_ids == (0, 1, 2)


def test_entries_that_cannot_be_read_are_passed(client: redis.Redis, ask: Callable[..., Found | None]) -> None:
    client.xadd(stream_key("a"), {"event": "{"})
    client.xadd(stream_key("a"), {"something": "else"})
    tell(client, JobStream("a", 1, streams=True), 2)
    found = ask("a", True)
    assert found is not None
    assert found.progress[0].token_ids == (0, 1)
    assert ask("unknown", True) is None


def test_a_broker_that_is_away_only_costs_the_progress(broker: Broker) -> None:
    reader = ProgressReader(redis.Redis.from_url(broker.url, socket_timeout=0.2, socket_connect_timeout=0.2))
    reader.start()
    broker.kill(signal.SIGSTOP)
    answers: queue.SimpleQueue[Found | None] = queue.SimpleQueue()
    for n in range(20):
        reader.read(Question(str(n), True, "r1"), answers.put)
    assert [answers.get(timeout=5) for _ in range(20)] == [None] * 20
    broker.kill(signal.SIGCONT)
    reader.stop()
    assert not reader.is_alive()
