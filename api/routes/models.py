"""Models and their queues."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from headrace.contract import JobStatus, ModelCard
from pydantic import BaseModel

from api.access import Reader
from api.door import TheDoor
from api.errors import responses
from ledger.contract import Backlog, Drain

router = APIRouter(prefix="/v1", tags=["models"])


class ModelObject(ModelCard):
    """A model in OpenAI's form, with what Headrace knows of it."""

    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "headrace"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class Queue(BaseModel):
    """The jobs of one model."""

    model: str
    jobs: dict[JobStatus, int]
    """Counts by status, of the jobs that the ledger still has."""
    waiting_tokens: int
    """Of the queued jobs: of their prompts, and of what they may generate."""
    jobs_per_s: float
    """How fast jobs end now."""
    backlog_s: float | None
    """How long the queued jobs would take at that rate; None while none ends."""
    workers: list[str]
    """Names of the workers that consume this queue now."""


class QueueList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Queue]


@router.get("/models", summary="List models", responses=responses())
async def models(door: TheDoor, _: Reader) -> ModelList:
    """The models that workers have registered, with their limits."""
    cards = await door.admission.cards()
    return ModelList(data=[ModelObject(**cards[name].model_dump()) for name in sorted(cards)])


@router.get("/queues", summary="List queues", responses=responses())
async def queues(door: TheDoor, caller: Reader) -> QueueList:
    """Each model's jobs by status, what waits and for how long, and the workers that consume its queue.

    Where keys are asked for, the jobs are the caller's tenant's.
    """
    counts = await door.call(door.ledger.counts, caller.tenant)
    backlog = await door.call(door.ledger.backlog, caller.tenant)
    workers = await door.workers()
    names = sorted({*counts, *workers.values()})
    drains = await door.call(door.ledger.drains, names)
    waiting = {
        name: Backlog(
            sum(each.jobs for (model, _), each in backlog.items() if model == name),
            sum(each.tokens for (model, _), each in backlog.items() if model == name),
        )
        for name in names
    }
    return QueueList(
        data=[
            Queue(
                model=name,
                jobs={status: counts.get(name, {}).get(status, 0) for status in JobStatus},
                waiting_tokens=waiting[name].tokens,
                jobs_per_s=round(drains[name].jobs_per_s, 3),
                backlog_s=backlog_s(waiting[name], drains[name]),
                workers=sorted(worker for worker, model in workers.items() if model == name),
            )
            for name in names
        ]
    )


def backlog_s(waiting: Backlog, drain: Drain) -> float | None:
    """Seconds until as many tokens have gone as wait now."""
    if not waiting.jobs:
        return 0.0
    rates = [(waiting.tokens, drain.tokens_per_s), (waiting.jobs, drain.jobs_per_s)]
    return next((round(amount / rate, 1) for amount, rate in rates if rate > 0), None)
