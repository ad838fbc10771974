"""A worker whose steps overlap: jobs get what they would have got, and can be stopped at any moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.contract import JobStatus

from bench.endurance.random_model import write_random_model
from tests.unit.kernels.isas import needs_library
from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = [pytest.mark.slow, needs_library]


def test_jobs_get_what_they_would_have_got(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "CACHE": tmp_path,
        "MODEL__MODEL_PATH": write_random_model(tmp_path / "model"),
        "MODEL__DTYPE": "float32",
        "MODEL__MAX_SEQ_LEN": 200,
        "MODEL__DEVICE": "cpu",
        "MODEL__NUM_SPECULATIVE_TOKENS": 0,
    }
    plain = start_worker("w1", **settings)
    expected = workplace.answers()
    assert plain.stop() == 0
    overlapped = start_worker("w2", **settings, MODEL__OVERLAP=True)
    assert workplace.answers() == expected
    assert overlapped.stop() == 0
    workplace.ledger.check()


def test_a_running_job_is_cancelled_and_its_pages_are_free(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    worker = start_worker(step_s=0.01, MODEL__OVERLAP=True)
    job = workplace.submit(prompt="endless", max_tokens=3000, ignore_eos=True)
    workplace.running(job.id)
    workplace.ledger.request_cancel([job.id])
    assert workplace.ended(job.id).status is JobStatus.CANCELLED
    engine = eventually(lambda: (found := workplace.pool_info(worker)["engine"]) and not found["running"] and found)
    assert engine["pages_free"] == engine["pages_total"]
    workplace.ledger.check()
