"""Submitting, reading and stopping jobs."""

from __future__ import annotations

from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Request, Response
from headrace.contract import Job, JobId, JobPage, JobRequest, JobStatus, JobUrls, Name
from headrace.tracing import TRACEPARENT, current, parsed
from headrace.validation import invalid, job_request
from pydantic import TypeAdapter, ValidationError

from api.access import Caller, Canceller, Reader, Submitter, revoked, still_valid
from api.body import read_json
from api.door import Door, TheDoor
from api.errors import responses, unknown_job
from api.openapi import json_body
from api.waiting import hold
from ledger.contract import IdempotencyConflict, JobFilter, Submission

_job_id: TypeAdapter[str] = TypeAdapter(JobId)

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

EXAMPLES: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 64,
        "temperature": 0.2,
    },
    "text": {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 32, "seed": 7, "priority": "low"},
    "JSON that follows a schema, twice": {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "A city on two rivers, as JSON."}],
        "n": 2,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "city",
                "schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        },
    },
    "a text to be scored": {
        "model": "smollm2-135m",
        "prompt": "The capital of France is Paris.",
        "max_tokens": 0,
        "prompt_logprobs": 3,
    },
    "with a deadline": {
        "model": "smollm2-135m",
        "prompt": "Name three rivers.",
        "ttl_s": 120,
        "idempotency_key": "order-4711",
        "tenant": "shop",
        "metadata": {"order": "4711"},
    },
}


def shown(request: Request, job: Job) -> Job:
    """The job with its URLs."""
    root = request.scope.get("root_path", "").rstrip("/")
    url = f"{root}/v1/jobs/{job.id}"
    urls = JobUrls(self=url, events=f"{url}/events", cancel=f"{url}/cancel", retry=f"{url}/retry")
    return job.model_copy(update={"urls": urls})


def known_id(job_id: str) -> str:
    """The id, if it could be one; raises NotFound."""
    try:
        return _job_id.validate_python(job_id)
    except ValidationError:
        raise unknown_job(job_id) from None


async def find(door: Door, caller: Caller, job_id: str) -> Job:
    """The job, if the caller may see it; raises NotFound, also for another tenant's."""
    job = await door.job(known_id(job_id), caller.tenant)
    if job is None:
        raise unknown_job(job_id)
    return job


async def accept(door: Door, caller: Caller, request: JobRequest, response: Response) -> Submission:
    """Check a request against its caller, its model and the room in its queue, write it down, and wake the relay."""
    request = caller.submitted(request)
    tokens = await door.admission.check(request)
    await door.bounds.check(request, tokens)
    response.headers.update(await door.rates.tokens(caller.key, tokens))
    try:
        submission = await door.call(door.ledger.submit, request, tokens=tokens)
    except IdempotencyConflict:
        raise
    except ValueError as error:
        raise invalid(str(error), "deadline") from None
    if submission.created:
        door.bounds.add(request, tokens)
        door.relay.wake()
        door.metrics.submitted.labels(request.model).inc()
    return submission


@router.post(
    "",
    status_code=202,
    summary="Submit a job",
    responses={
        202: {
            "description": "Accepted. `Location` is the job's URL; `Idempotent-Replayed: true` marks a job that "
            "an earlier request with this key had made."
        },
        **responses(400, 404, 409, 413, 415, 429),
    },
    openapi_extra=json_body(JobRequest, EXAMPLES),
)
async def submit(
    request: Request,
    response: Response,
    door: TheDoor,
    caller: Submitter,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="The same as `idempotency_key` in the body, which may be left out then. "
            "Two different keys are refused. A key belongs to its tenant."
        ),
    ] = None,
    traceparent: Annotated[
        str | None,
        Header(
            description="The caller's span, as W3C Trace Context writes it; one that isn't right is ignored. "
            "`traceparent` in the body goes before it."
        ),
    ] = None,
) -> Job:
    """Enqueue a job for a `prompt` or for chat `messages`.

    It is checked here against its model: a prompt that can't fit is refused with both numbers. Once it
    is accepted it is in the database, and ends in exactly one recorded outcome. While too many jobs or tokens wait
    for the model, or of the tenant, the answer is 429.
    """
    fields = await read_json(request, door.settings.api.max_body_bytes)
    if len(request.headers.getlist("idempotency-key")) > 1:
        raise invalid("the header Idempotency-Key is there more than once", "idempotency_key")
    if idempotency_key is not None and isinstance(fields, dict):
        _add_key(fields, idempotency_key)
    if isinstance(fields, dict) and fields.get("traceparent") is None:
        fields["traceparent"] = _caller_span(request, traceparent)
    submission = await accept(door, caller, await to_thread.run_sync(job_request, fields), response)
    job = shown(request, submission.job)
    response.headers["Location"] = job.urls.self if job.urls else ""
    if not submission.created:
        response.headers["Idempotent-Replayed"] = "true"
    return job


def _add_key(fields: dict[str, Any], key: str) -> None:
    if fields.get("idempotency_key") is None:
        fields["idempotency_key"] = key
    elif fields["idempotency_key"] != key:
        raise invalid("the header Idempotency-Key and idempotency_key in the body differ", "idempotency_key")


def _caller_span(request: Request, header: str | None) -> str | None:
    """The span that this request is served in, if this process makes spans, else the one that its header names."""
    return current() or (parsed(header) if len(request.headers.getlist(TRACEPARENT)) == 1 else None)


@router.get("", summary="List jobs, newest first", responses=responses(400))
async def page(
    request: Request,
    door: TheDoor,
    caller: Reader,
    status: JobStatus | None = None,
    model: Name | None = None,
    tenant: Name | None = None,
    after: Annotated[JobId | None, Query(description="`last_id` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> JobPage:
    """A page of jobs, of the caller's tenant where keys are asked for. `has_more` says whether `after=last_id` gives
    another one."""
    try:
        found = await door.call(door.ledger.page, JobFilter(status, model, caller.listed(tenant), after, limit))
    except ValueError as error:
        raise invalid(f"after: {error}", "after") from None
    return found.model_copy(update={"data": [shown(request, job) for job in found.data]})


@router.get("/{id}", summary="Read a job, or wait for its end", responses=responses(400, 404))
async def get(
    request: Request,
    door: TheDoor,
    caller: Reader,
    id: str,  # noqa: A002 - the name in the path
    wait: Annotated[
        float,
        Query(
            ge=0,
            allow_inf_nan=False,
            description="Hold the answer until the job has ended, for at most this many seconds "
            "(the server's `max_wait_s` is the most that it holds it)",
        ),
    ] = 0.0,
) -> Job:
    """The job: where it stands, its result and timings when it has ended."""
    job = await find(door, caller, id)
    if wait > 0 and not job.status.terminal:
        job = await hold(door, request, job, min(wait, door.settings.api.max_wait_s))
        if not await still_valid(door, caller):
            raise revoked()
    return shown(request, job)


@router.post("/{id}/cancel", summary="Cancel a job", responses=responses(404))
async def cancel(request: Request, door: TheDoor, caller: Canceller, id: str) -> Job:  # noqa: A002
    """Stop a job. A queued one is `cancelled` at once; a running one when its worker has let go of it
    (`cancel_requested` is true until then). A job that has ended stays as it is."""
    await find(door, caller, id)
    jobs = await door.call(door.ledger.request_cancel, [id])
    if id not in jobs:
        raise unknown_job(id)
    door.relay.wake()
    door.watch.wake(id)
    return shown(request, jobs[id])


@router.post("/{id}/retry", summary="Run a job again", responses=responses(404, 409))
async def retry(request: Request, door: TheDoor, caller: Submitter, id: str) -> Job:  # noqa: A002
    """Enqueue a job that ended without success once more, its attempts counted from 0."""
    await find(door, caller, id)
    job = await door.call(door.ledger.retry, id)
    door.relay.wake()
    return shown(request, job)
