"""A step runs out of memory in a whole worker with a real model, and the pages are few besides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from headrace.contract import JobStatus, Reason

from tests.faults.short_memory import MOST_CONTEXT_TOKENS
from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = [pytest.mark.slow, pytest.mark.model]

MODEL = {
    "MODEL__MODEL_PATH": "smollm2-135m",
    "MODEL__ALIAS": "fake",
    "MODEL__DEVICE": "cpu",
    "MODEL__MAX_SEQ_LEN": 128,
    "MODEL__KV_CACHE_BYTES": 4 * 2**20,
}
"""The pages hold some 180 tokens: those of two of the jobs, and not of all."""
FITS = {"prompt": "Once upon a time there was a miller who had a mill on a river. " * 2, "max_tokens": 40}
GROWS = {"prompt": "A story that never ends:", "max_tokens": 110}
ALIKE = {"temperature": 0.0, "ignore_eos": True}


def test_smaller_steps_are_made_and_the_one_that_cannot_fit_fails_alone(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], demo_model: object
) -> None:
    worker = start_worker("w1", extra=("-I", "tests.faults.short_memory"), ready=False, **MODEL).wait_ready(60)
    fitting = [workplace.submit(**FITS, **ALIKE).id for _ in range(4)]
    growing = workplace.submit(**GROWS, **ALIKE).id
    jobs = [workplace.ended(job_id, within_s=90) for job_id in fitting]
    failed = workplace.ended(growing, within_s=90)
    after = workplace.ended(workplace.submit(**FITS, **ALIKE).id, within_s=60)

    assert {job.status for job in (*jobs, after)} == {JobStatus.SUCCEEDED}
    assert {job.result and job.result.text for job in jobs} == {after.result and after.result.text}
    assert {job.attempt for job in (*jobs, failed, after)} == {1}
    assert sum(job.timings.preemptions or 0 for job in (*jobs, failed) if job.timings) > 0, "pages were short too"

    assert (failed.status, failed.error and failed.error.code) == (JobStatus.FAILED, Reason.ENGINE_ERROR)
    assert "MemoryError" in (failed.error.message if failed.error else "")
    assert failed.result is not None
    usage = failed.result.usage
    assert usage.prompt_tokens + usage.completion_tokens >= MOST_CONTEXT_TOKENS, "what it had is kept"

    assert "memory is short for a step" in worker.log
    pool = eventually(lambda: (info := workplace.pool_info(worker))["slots"] == 0 and info, 10, "no slot is taken")
    engine = pool["engine"]
    assert (engine["running"], engine["waiting"]) == (0, 0)
    assert engine["pages_free"] == engine["pages_total"]
    eventually(lambda: workplace.unacked() == 0, 10, "every message is acknowledged")
    workplace.ledger.check()
