"""A job that another worker takes over goes on from its tokens; its readers see one text."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from headrace.contract import Job, JobStatus
from headrace.events import job_event
from headrace.sse import TextReader
from headrace.wire import progress_key, stream_key

from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

LENGTH = 200
CUTS = {"kill": signal.SIGKILL, "hand back": signal.SIGTERM}
JOBS: dict[str, dict[str, Any]] = {
    "streamed": {"stream": True},
    "not streamed": {"stream": False},
    "several, scored, penalised": {
        "stream": True,
        "n": 2,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "frequency_penalty": 0.5,
        "allowed_token_ids": list(range(97, 123)),
    },
    "held to a grammar": {"stream": False, "guided_regex": "[a-m]{300}", "logprobs": 0},
}


def read_text(workplace: Workplace, job: Job) -> str:
    """What somebody who follows the job's events puts together."""
    reader = TextReader(job.id)
    told = [job_event.validate_json(fields[b"event"]) for _, fields in workplace.redis.xrange(stream_key(job.id))]
    shown = [reader.take(event) for event in told if event.event == "token"]
    return "".join(shown)


def steps(workplace: Workplace, worker: WorkerProcess) -> int:
    return int(workplace.pool_info(worker)["engine"]["generation_tokens"])


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("kind", JOBS)
def test_a_job_goes_on_where_it_was(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], how: str, kind: str
) -> None:
    fields = {"prompt": "once upon", "max_tokens": LENGTH, **JOBS[kind]}
    first = start_worker("w1", step_s=0.02, WORKER__LEASE_S=2, WORKER__DRAIN_S=0)
    undisturbed = workplace.ended(workplace.submit(**fields).id, within_s=30)
    job = workplace.submit(**fields)
    key = stream_key(job.id) if JOBS[kind]["stream"] else progress_key(job.id)
    eventually(lambda: workplace.redis.xlen(key) > (40 if JOBS[kind]["stream"] else 2), 20, "it has produced a part")
    first.signal(CUTS[how])
    first.wait()
    second = start_worker("w2", step_s=0.001, WORKER__LEASE_S=2)
    done = workplace.ended(job.id, within_s=20)
    assert done.status is JobStatus.SUCCEEDED
    assert done.result is not None
    assert undisturbed.result is not None
    assert done.result.model_copy(update={"usage": None}) == undisturbed.result.model_copy(update={"usage": None})
    assert done.result.usage.completion_tokens == undisturbed.result.usage.completion_tokens
    assert done.attempt == (2 if how == "kill" else 1)
    assert steps(workplace, second) < LENGTH * JOBS[kind].get("n", 1) - 30, "the second worker did not begin anew"
    assert "goes on after" in second.log
    assert done.timings is not None
    assert (done.timings.generation_time_ms or 0) > 500, "the first worker's time counts"
    if JOBS[kind]["stream"]:
        assert read_text(workplace, done) == done.result.text
    eventually(lambda: not workplace.redis.exists(progress_key(job.id)), 5, "nothing is left of it")


def test_an_emptied_broker_only_costs_that_it_is_computed_again(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    first = start_worker("w1", step_s=0.02, WORKER__LEASE_S=2)
    job = workplace.submit(max_tokens=LENGTH)
    workplace.running(job.id)
    workplace.redis.flushall()
    first.kill()
    second = start_worker("w2", step_s=0.001, WORKER__LEASE_S=2)
    done = workplace.ended(job.id, within_s=20)
    assert (done.status, done.attempt) == (JobStatus.SUCCEEDED, 2)
    assert steps(workplace, second) == LENGTH


def test_another_model_begins_anew(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    """Readers see the one text all the same: it begins at offset 0 again, and they skip what they have."""
    first = start_worker("w1", step_s=0.02, WORKER__LEASE_S=2)
    job = workplace.submit(max_tokens=LENGTH)
    workplace.running(job.id)
    first.kill()
    second = start_worker("w2", WORKER__LEASE_S=2, MODEL__MODEL_PATH="fake:step_s=0.001,revision=2")
    done = workplace.ended(job.id, within_s=20)
    assert done.result is not None
    assert steps(workplace, second) == LENGTH
    assert read_text(workplace, done) == done.result.text


@pytest.mark.model
def test_a_real_models_sampled_text_is_the_undisturbed_one(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], demo_model: object
) -> None:
    model = {
        "MODEL__MODEL_PATH": "smollm2-135m",
        "MODEL__ALIAS": "fake",
        "WORKER__LEASE_S": 3,
        "MODEL__MAX_SEQ_LEN": 512,
    }
    fields = {"prompt": "The river", "max_tokens": 160, "temperature": 0.9, "seed": 11, "ignore_eos": True}
    first = start_worker("w1", **model, ready=False).wait_ready(60)
    undisturbed = workplace.ended(workplace.submit(**fields).id, within_s=60)
    job = workplace.submit(**fields)
    eventually(lambda: workplace.redis.xlen(stream_key(job.id)) > 30, 30, "it has produced a part")
    first.kill()
    second = start_worker("w2", **model, ready=False).wait_ready(60)
    done = workplace.ended(job.id, within_s=60)
    assert done.result is not None
    assert undisturbed.result is not None
    assert (done.result.text, done.result.token_ids) == (undisturbed.result.text, undisturbed.result.token_ids)
    assert read_text(workplace, done) == done.result.text
    assert steps(workplace, second) < 160
