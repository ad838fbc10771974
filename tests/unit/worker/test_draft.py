"""Outcomes and their timings."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from headrace.contract import JobRequest, JobStatus, Priority, Reason
from headrace.sampling import SamplingFields

from engine.request import Choice, FinishReason, RequestMetrics, RequestOutput, SamplingParams, TokenLogprob, TopLogprob
from ledger.contract import ClaimResult, Lease, Verdict
from worker.draft import ClaimedJob, Identity, ended, refused, stopped
from worker.slot import Cause, Stop

WHO = Identity("fake@host", "cpu", "float32", "r1")
JOB = ClaimedJob(Lease("j1", "w/1", 3, 2), JobRequest(model="fake", prompt="hi"), accepted_s=100.0, deadline_s=None)
METRICS = RequestMetrics(
    arrived_s=100.5, admitted_s=101.0, first_token_s=101.25, last_token_s=102.25, finished_s=102.25,
    cached_tokens=16, preemptions=1, mean_batch_size=3.5, max_batch_size=5,
)  # fmt: skip


def output(*choices: Choice, reason: FinishReason = FinishReason.STOP, **fields: Any) -> RequestOutput:
    """What the engine gives for these completions."""
    first = choices[0]
    given = {"metrics": METRICS, "choices": choices, "logprobs": first.logprobs, **fields}
    return RequestOutput("j1", (1, 2), first.token_ids, first.text, reason, first.stop_reason, **given)


def choice(text: str, index: int = 0, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Choice:
    ids = tuple(5 + i for i in range(len(text)))
    return Choice(index, ids, text, reason, **{"stop_reason": 7, "logprobs": None, **fields})


OUTPUT = output(choice("abcde"))


def test_the_timings_are_differences_that_add_up() -> None:
    outcome = ended(JOB, WHO, OUTPUT).outcome(commit_s=102.5)
    timings = outcome.timings
    assert outcome.status is JobStatus.SUCCEEDED
    assert timings is not None
    assert timings.model_dump(exclude_none=True) == {
        "queue_time_ms": 1000.0,
        "time_to_first_token_ms": 750.0,
        "prefill_time_ms": 250.0,
        "generation_time_ms": 1250.0,
        "mean_itl_ms": 250.0,
        "tokens_per_second": 4.0,
        "commit_time_ms": 250.0,
        "total_time_ms": 2500.0,
        "cached_tokens": 16,
        "preemptions": 1,
        "attempts": 2,
        "mean_batch_size": 3.5,
        "max_batch_size": 5,
        "worker": "fake@host",
        "device": "cpu",
        "dtype": "float32",
        "model_revision": "r1",
    }


def test_an_adapter_goes_to_the_engine_and_its_revision_into_the_timings() -> None:
    who = dataclasses.replace(WHO, adapters={"sql": "a1", "law": "b2"})
    for name, revision in (("sql", "r1+a1"), ("law", "r1+b2"), (None, "r1")):
        job = dataclasses.replace(JOB, request=JobRequest(model="fake", prompt="hi", adapter=name))
        assert job.engine_request().adapter == name
        timings = ended(job, who, OUTPUT).timings
        assert timings.model_revision == revision


def test_the_result_is_the_engines() -> None:
    result = ended(JOB, WHO, OUTPUT).result
    assert result is not None
    assert (result.text, result.token_ids, result.finish_reason, result.stop_reason) == (
        "abcde",
        [5, 6, 7, 8, 9],
        "stop",
        7,
    )
    assert result.usage.model_dump() == {
        "prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7, "cached_tokens": 16
    }  # fmt: skip


def test_one_token_has_no_gap_and_no_token_has_no_rate() -> None:
    one = output(choice("a"), metrics=dataclasses.replace(METRICS, last_token_s=101.25))
    timings = ended(JOB, WHO, one).timings
    assert timings.mean_itl_ms is None
    assert timings.tokens_per_second == 4.0
    none = output(choice(""), metrics=dataclasses.replace(METRICS, first_token_s=None, last_token_s=None))
    outcome = ended(JOB, WHO, none).outcome(103.0)
    assert outcome.timings is not None
    assert outcome.timings.generation_time_ms is None
    assert outcome.timings.commit_time_ms == 750.0


@pytest.mark.parametrize(
    ("cause", "status", "reason"),
    [
        (Cause.CANCELLED, JobStatus.CANCELLED, Reason.CANCELLED),
        (Cause.EXPIRED, JobStatus.EXPIRED, Reason.DEADLINE_EXCEEDED),
        (Cause.TIME_LIMIT, JobStatus.FAILED, Reason.TIME_LIMIT),
    ],
)
def test_a_stopped_job_keeps_its_part(cause: Cause, status: JobStatus, reason: Reason) -> None:
    aborted = dataclasses.replace(OUTPUT, finish_reason=FinishReason.ABORT)
    draft = stopped(JOB, WHO, Stop(cause, "why", 102.0), aborted)
    assert (draft.status, draft.reason, draft.message) == (status, reason, "why")
    assert draft.result is not None
    assert draft.result.text == "abcde"
    assert draft.result.finish_reason == "abort"
    assert stopped(JOB, WHO, Stop(cause, "why", 102.0), None).result is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("context_length_exceeded", Reason.CONTEXT_LENGTH_EXCEEDED),
        ("unheard of", Reason.ENGINE_ERROR),
        (None, Reason.ENGINE_ERROR),
    ],
)
def test_an_engines_error_keeps_its_code(code: str | None, reason: Reason) -> None:
    broken = output(choice(""), reason=FinishReason.ERROR, error="no room", error_code=code)
    draft = ended(JOB, WHO, broken)
    assert (draft.status, draft.reason, draft.message, draft.result) == (JobStatus.FAILED, reason, "no room", None)


def test_a_refused_job_has_a_reason_and_an_attempt() -> None:
    draft = refused(JOB, WHO, Reason.MODEL_NOT_FOUND, "no such model")
    assert (draft.status, draft.reason, draft.timings.attempts) == (JobStatus.FAILED, Reason.MODEL_NOT_FOUND, 2)


def test_a_request_for_the_engine_says_all_that_was_asked() -> None:
    asked = JobRequest(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3, temperature=0.5, top_p=0.9, top_k=4,
        min_p=0.1, seed=7, stop=["x"], stop_token_ids=[9], ignore_eos=True, priority=Priority.HIGH,
    )  # fmt: skip
    claim = ClaimResult("j1", Verdict.RUN, JOB.lease, asked, queued_s=2.0)
    request = ClaimedJob.from_claim(claim).engine_request()
    assert (request.id, request.prompt, request.messages) == ("j1", None, ({"role": "user", "content": "hi"},))
    assert request.priority < JOB.engine_request().priority
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (3, 0.5, 0.9, 4, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (7, ("x",), (9,), True)
    assert dataclasses.replace(JOB, request=JobRequest(model="fake", prompt=[1, 2])).engine_request().prompt == (1, 2)


def test_a_claim_that_was_not_granted_is_no_job() -> None:
    with pytest.raises(ValueError, match="carries a lease"):
        ClaimedJob.from_claim(ClaimResult("j1", Verdict.DUPLICATE))


def test_the_engine_learns_whose_the_job_is_how_urgent_and_until_when() -> None:
    request = JobRequest(model="fake", prompt="hi", tenant="shop", priority=Priority.HIGH, ttl_s=60)
    claim = ClaimResult("j1", Verdict.RUN, lease=JOB.lease, request=request, queued_s=1.0, remaining_s=30.0)
    before_s = time.monotonic()
    asked = ClaimedJob.from_claim(claim).engine_request()
    assert (asked.id, asked.tenant, asked.namespace, asked.priority) == ("j1", "shop", "shop", 0)
    assert asked.deadline_s is not None
    assert before_s + 30.0 <= asked.deadline_s <= time.monotonic() + 30.0


def test_every_parameter_of_a_job_reaches_the_engine() -> None:
    """The names are the same on both sides, so none can be forgotten."""
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(SamplingFields.model_fields)
    asked = {
        "n": 3, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "bad_words": ["no"],
        "logit_bias": {"7": 2.0}, "allowed_token_ids": [1, 2], "logprobs": 4, "prompt_logprobs": 0,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": None}}},
    }  # fmt: skip
    request = JobRequest.model_validate({"model": "fake", "prompt": "hi", **asked})
    params = dataclasses.replace(JOB, request=request).engine_request().params
    assert {name: getattr(params, name) for name in asked} == {
        **asked, "bad_words": ("no",), "logit_bias": {7: 2.0}, "allowed_token_ids": (1, 2)
    }  # fmt: skip
    choices = JobRequest(model="fake", prompt="hi", guided_choice=["a", "b"])
    assert dataclasses.replace(JOB, request=choices).engine_request().params.guided_choice == ("a", "b")


def test_logprobs_are_told_with_their_texts() -> None:
    found = TokenLogprob(5, "a", b"a", -0.5, 2, (TopLogprob(9, "\ufffd", b"\xff", -0.1),))
    whole = output(choice("a", logprobs=(found,)), prompt_logprobs=(None, found))
    result = ended(JOB, WHO, whole).result
    assert result is not None
    told = {
        "token": "a", "token_id": 5, "bytes": [97], "logprob": -0.5, "rank": 2,
        "top": [{"token": "\ufffd", "token_id": 9, "bytes": [255], "logprob": -0.1}],
    }  # fmt: skip
    shown = result.model_dump(mode="json")
    assert (shown["logprobs"], shown["prompt_logprobs"], shown["choices"]) == ([told], [None, told], [])


def test_several_completions_stand_in_order_and_the_first_one_above() -> None:
    found = TokenLogprob(5, "a", b"a", -0.5, 1, ())
    several = output(choice("ab", logprobs=(found, found)), choice("cde", 1, FinishReason.LENGTH, stop_reason=None))
    result = ended(JOB, WHO, several).result
    assert result is not None
    assert (result.text, result.finish_reason, result.logprobs) == ("ab", "stop", None)
    assert [(c.index, c.text, c.finish_reason) for c in result.choices] == [(0, "ab", "stop"), (1, "cde", "length")]
    assert result.choices[0].logprobs is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total_tokens) == (2, 5, 7)
    timings = ended(JOB, WHO, several).timings
    assert (timings.tokens_per_second, timings.mean_itl_ms) == (4.0, 500.0)


def test_a_failed_job_keeps_what_its_other_completions_had() -> None:
    broken = output(
        choice("", reason=FinishReason.ERROR), choice("cd", 1, FinishReason.ABORT), reason=FinishReason.ERROR, error="x"
    )
    result = ended(JOB, WHO, broken).result
    assert result is not None
    assert [(c.text, c.finish_reason) for c in result.choices] == [("", None), ("cd", "abort")]
