"""Models and their queues."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from headrace.contract import JobStatus, ModelCard
from pydantic import BaseModel

from api.access import Reader
from api.door import TheDoor
from api.errors import responses

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
    """Each model's jobs by status, and the workers that consume its queue.

    Where keys are asked for, the jobs are the caller's tenant's.
    """
    counts = await door.call(door.ledger.counts, caller.tenant)
    workers = await door.workers()
    names = sorted({*counts, *workers.values()})
    return QueueList(
        data=[
            Queue(
                model=name,
                jobs={status: counts.get(name, {}).get(status, 0) for status in JobStatus},
                workers=sorted(worker for worker, model in workers.items() if model == name),
            )
            for name in names
        ]
    )
