"""Jobs that used up their attempts, each lost with a worker: to look at, to run again, to delete."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from headrace.contract import DeadLetter, Job, JobId, JobPage, LostAttempt, Name, Reason
from headrace.validation import invalid

from api.access import Caller, Canceller, Reader, Submitter
from api.door import Door, TheDoor
from api.errors import no_dead_letter, responses, unknown_job
from api.routes.jobs import find, shown
from ledger.contract import JobFilter

router = APIRouter(prefix="/v1/dead-letters", tags=["dead letters"])


async def dead(door: Door, caller: Caller, job_id: str) -> Job:
    """The job, if it is a dead letter that the caller may see; raises NotFound."""
    job = await find(door, caller, job_id)
    if job.error is None or job.error.code is not Reason.DEAD_LETTER:
        raise no_dead_letter(job)
    return job


@router.get("", summary="List dead letters, newest first", responses=responses(400))
async def page(
    request: Request,
    door: TheDoor,
    caller: Reader,
    model: Name | None = None,
    tenant: Name | None = None,
    older_than_s: Annotated[
        float | None, Query(ge=0, le=1e9, allow_inf_nan=False, description="Only those that ended so long ago")
    ] = None,
    after: Annotated[JobId | None, Query(description="`last_id` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> JobPage:
    """A page of them. `has_more` says whether `after=last_id` gives another one."""
    where = JobFilter(
        model=model,
        tenant=caller.listed(tenant),
        after=after,
        limit=limit,
        reason=Reason.DEAD_LETTER,
        ended_before_s=older_than_s,
    )
    try:
        found = await door.call(door.ledger.page, where)
    except ValueError as error:
        raise invalid(f"after: {error}", "after") from None
    return found.model_copy(update={"data": [shown(request, job) for job in found.data]})


@router.get("/{id}", summary="Read a dead letter", responses=responses(404))
async def get(request: Request, door: TheDoor, caller: Reader, id: str) -> DeadLetter:  # noqa: A002
    """The job, and the attempts that it lost: where, when, and together with how many others."""
    job = shown(request, await dead(door, caller, id))
    losses = await door.call(door.ledger.losses, id)
    return DeadLetter(**job.model_dump(), lost_attempts=[LostAttempt(**asdict(loss)) for loss in losses])


@router.post("/{id}/replay", summary="Run a dead letter again", responses=responses(404, 409))
async def replay(request: Request, door: TheDoor, caller: Submitter, id: str) -> Job:  # noqa: A002
    """Enqueue it once more, its attempts counted from 0. What is known of the lost ones is kept."""
    await dead(door, caller, id)
    job = await door.call(door.ledger.retry, id)
    door.relay.wake()
    return shown(request, job)


@router.delete("/{id}", summary="Delete a dead letter", responses=responses(404))
async def purge(request: Request, door: TheDoor, caller: Canceller, id: str) -> Job:  # noqa: A002
    """Delete the job for good, with all that is kept of it. Answers with what it was."""
    job = await dead(door, caller, id)
    if not await door.call(door.ledger.purge, id, caller.tenant):
        raise unknown_job(id)
    return shown(request, job)
