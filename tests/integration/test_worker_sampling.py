"""Sampling parameters on their way: Celery message, engine, ledger, stream and result."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import redis
from headrace.contract import Job, JobStatus, Reason
from headrace.events import StateEvent, TokenEvent, job_event
from headrace.wire import stream_key

from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow


def events(workplace: Workplace, job_id: str) -> list[StateEvent | TokenEvent]:
    with redis.Redis.from_url(workplace.broker_url) as broker:
        return [job_event.validate_json(fields[b"event"]) for _, fields in broker.xrange(stream_key(job_id))]


def test_logprobs_are_in_the_ledger_and_in_celerys_result(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker()
    sent = workplace.send(prompt="hello", max_tokens=3, logprobs=2, prompt_logprobs=0, temperature=0.0)
    job = Job.model_validate(sent.get(timeout=10))
    assert workplace.job(sent.id) == job
    assert job.result is not None
    assert [told.token_id for told in job.result.logprobs or []] == job.result.token_ids
    assert all(len(told.top) == 2 and told.rank == 1 for told in job.result.logprobs or [])
    assert [told and told.token for told in job.result.prompt_logprobs or []] == [None, "e", "l", "l", "o"]
    workplace.ledger.check()


def test_a_prompt_can_be_scored_without_generating(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker()
    job = Job.model_validate(workplace.send(prompt="hello", max_tokens=0, prompt_logprobs=1).get(timeout=10))
    assert job.result is not None
    assert (job.result.text, job.result.finish_reason, len(job.result.prompt_logprobs or [])) == ("", "length", 5)


def test_several_completions_are_one_job(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker()
    sent = workplace.send(prompt="hello", max_tokens=12, n=3, logprobs=0)
    job = Job.model_validate(sent.get(timeout=10))
    assert job.result is not None
    choices = job.result.choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert (job.result.text, job.result.token_ids) == (choices[0].text, choices[0].token_ids)
    assert job.result.usage.completion_tokens == 36
    assert [len(choice.logprobs or []) for choice in choices] == [12, 12, 12]
    streamed = ["", "", ""]
    for event in events(workplace, sent.id):
        if isinstance(event, TokenEvent):
            assert event.offset == len(streamed[event.index])
            streamed[event.index] += event.text
    assert streamed == [choice.text for choice in choices]
    workplace.ledger.check()


def test_a_cancelled_job_keeps_what_each_completion_had(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker(step_s=0.02)
    sent = workplace.send(prompt="hello", max_tokens=2000, n=2)
    eventually(lambda: len(events(workplace, sent.id)) > 8, 10, "tokens come")
    workplace.app.control.revoke(sent.id, terminate=True)
    job = workplace.ended(sent.id)
    assert job.status is JobStatus.CANCELLED
    assert job.result is not None
    assert [choice.finish_reason for choice in job.result.choices] == ["abort", "abort"]
    assert all(choice.text for choice in job.result.choices)
    workplace.ledger.check()


def test_a_schema_is_followed(workplace: Workplace, start_worker: Callable[..., WorkerProcess]) -> None:
    start_worker()
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    job = Job.model_validate(workplace.send(prompt="hello", max_tokens=400, response_format=asked).get(timeout=20))
    assert job.result is not None
    assert isinstance(json.loads(job.result.text)["ok"], bool)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"logit_bias": {"99999": 1}}, "token id 99999 is outside the vocabulary of 262"),
        ({"guided_regex": "("}, "guided_regex: "),
        ({"n": 99}, "n: "),
    ],
)
def test_what_the_model_cannot_fulfil_is_a_failed_job_with_its_reason(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], asked: dict[str, object], says: str
) -> None:
    """https://github.com/vllm-project/vllm/issues/6866"""
    start_worker()
    sent = workplace.send(prompt="hello", **asked)
    good = workplace.send(prompt="hello", max_tokens=3)
    job = workplace.ended(sent.id)
    assert job.error is not None
    assert (job.status, job.error.code, says in job.error.message) == (JobStatus.FAILED, Reason.INVALID_REQUEST, True)
    assert workplace.ended(good.id).status is JobStatus.SUCCEEDED
