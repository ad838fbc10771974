"""Jobs through a real worker process: broker, pool, engine, ledger and back."""

from __future__ import annotations

from collections.abc import Callable

from headrace.contract import JobStatus

from tests.workers import WorkerProcess, Workplace, eventually


def test_a_raw_producers_result_equals_the_ledgers(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker()
    sent = workplace.send(max_tokens=12)
    result = sent.get(timeout=10)
    job = workplace.job(sent.id)
    assert job.status is JobStatus.SUCCEEDED
    assert job.result is not None
    assert job.timings is not None
    assert result == {
        "job_id": sent.id,
        "status": "succeeded",
        "text": job.result.text,
        "finish_reason": "length",
        "usage": job.result.usage.model_dump(mode="json"),
        "timings": job.timings.model_dump(mode="json"),
    }
    assert len(job.result.token_ids) == job.result.usage.completion_tokens == 12
    assert job.attempt == job.timings.attempts == 1
    assert job.timings.worker == worker.node
    eventually(lambda: workplace.unacked() == 0, 2, "the message is acknowledged")
    assert workplace.queued_messages() == 0
    assert worker.stop() == 0
    workplace.ledger.check()
