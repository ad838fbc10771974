"""Jobs as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from headrace.contract import Choice, Job, JobError, JobResult, JobStatus, Priority, Reason, Timings, Usage
from headrace.tracing import EXAMPLE
from rich.console import Console, RenderableType

from cli.render import age, dead_letters, facts, listing, ms, one_line, whole

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def job(**changes: Any) -> Job:
    return Job(
        id="01a228d0-6211-7df2-a9ae-98c99bdd329f",
        model="tiny",
        status=JobStatus.SUCCEEDED,
        priority=Priority.NORMAL,
        tenant="default",
        created_at=NOW - timedelta(minutes=5),
        attempt=1,
    ).model_copy(update=changes)


def text(renderable: RenderableType, width: int = 100) -> str:
    console = Console(width=width, file=StringIO())
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


RESULT = JobResult(
    text="the [bold] text",
    finish_reason="length",
    usage=Usage(prompt_tokens=7, completion_tokens=3, total_tokens=10, cached_tokens=4),
)
TIMINGS = Timings(
    queue_time_ms=3.14159,
    mean_itl_ms=14.2,
    time_to_first_token_ms=5,
    total_time_ms=12_345.6,
    tokens_per_second=71.83,
    mean_batch_size=10.51,
)


def test_a_finished_job_shows_its_text_tokens_and_times() -> None:
    shown = text(whole(job(result=RESULT, timings=TIMINGS, worker="w@here")))
    assert "the [bold] text" in shown
    assert "7 in, 4 of them cached, 3 out (ended by length)" in shown
    assert "queued 3.1 ms, between tokens 14 ms, total 12.3 s" in shown
    assert "71.8 tokens/s, batch of 10.5" in shown
    assert "w@here" in shown
    assert "trace" not in shown


def test_a_jobs_trace_is_shown_by_its_id() -> None:
    [line] = [line for line in text(facts(job(traceparent=EXAMPLE))).splitlines() if "trace" in line]
    assert line.split() == ["trace", "4bf92f3577b34da6a3ce929d0e0e4736"]


def test_every_completion_is_shown() -> None:
    choices = [Choice(index=0, text="the first"), Choice(index=1, text="the [bold] second")]
    shown = text(whole(job(result=RESULT.model_copy(update={"text": "the first", "choices": choices}))))
    assert shown.splitlines()[:2] == ["[0] the first", "[1] the [bold] second"]


def test_a_failed_job_shows_why() -> None:
    error = JobError(code=Reason.DEAD_LETTER, message="its [worker] died")
    shown = text(facts(job(status=JobStatus.FAILED, attempt=3, error=error)))
    assert "dead_letter: its [worker] died" in shown
    assert "failed (attempt 3 of 3)" in shown


def test_a_job_that_is_being_stopped_says_so() -> None:
    assert "running (stopping)" in text(facts(job(status=JobStatus.RUNNING, cancel_requested=True)))
    assert "stopping" not in text(facts(job(status=JobStatus.CANCELLED, cancel_requested=True)))


def test_a_listing_cuts_texts_and_nothing_else() -> None:
    jobs = [job(result=RESULT.model_copy(update={"text": "the [bold]\nlong text"}), timings=TIMINGS), job()]
    assert listing(jobs, NOW, 80).plain.splitlines() == [
        "Job                                   Status     Age    Total   Text",
        "01a228d0-6211-7df2-a9ae-98c99bdd329f  succeeded  5 min  12.3 s  the [bold] long…",
        "01a228d0-6211-7df2-a9ae-98c99bdd329f  succeeded  5 min  -       ",
    ]


def test_a_listing_too_wide_for_the_terminal_keeps_its_columns() -> None:
    shown = listing([job(result=RESULT, timings=TIMINGS), job(model="other" * 5)], NOW, 40).plain
    assert "other" * 5 in shown
    assert "12.3 s  the [bold] …" in shown


def test_dead_letters_show_when_and_with_whom_they_died() -> None:
    died = job(status=JobStatus.FAILED, attempt=3, finished_at=NOW - timedelta(hours=2), worker="w@here/1234")
    assert dead_letters([died, died.model_copy(update={"worker": None})], NOW, 100).plain.splitlines() == [
        "Job                                   Model  Tenant   Died  Attempts  Last worker",
        "01a228d0-6211-7df2-a9ae-98c99bdd329f  tiny   default  2 h   3 of 3    w@here/1234",
        "01a228d0-6211-7df2-a9ae-98c99bdd329f  tiny   default  2 h   3 of 3    -",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "-"), (0.04, "0.0 ms"), (9.96, "10.0 ms"), (10.4, "10 ms"), (9999, "9999 ms"), (10_000, "10.0 s")],
)
def test_durations(value: float | None, expected: str) -> None:
    assert ms(value) == expected


def test_short_forms() -> None:
    assert one_line("a\n  b\tc", 10) == "a b c"
    assert one_line("abcdefghij", 5) == "abcd…"
    assert [age(seconds) for seconds in (-1, 59, 61, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
