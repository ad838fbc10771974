"""Events of a job, as they stand in its Redis stream and travel over SSE.

An entry's id (`<ms>-<n>`) is the SSE event id, so `Last-Event-ID` replays from the broker. The
`offset` of a token event counts the characters of its completion before its text in this attempt; a `state`
event with status `running` starts an attempt at offset 0 again, and the seed of a job is fixed when
it is accepted, so a reader that skips what it already has sees one continuous text. An attempt that goes on
from the tokens of an earlier one repeats them first, in one event.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

from headrace.contract import Job, JobStatus, TokenLogprob


class StateEvent(BaseModel):
    """The job entered `status`. A terminal one carries the whole job when read through the HTTP door."""

    event: Literal["state"] = "state"
    status: JobStatus
    attempt: int = 0
    revision: str | None = None
    """Of the model that runs it, for `running`."""
    job: Job | None = None


class TokenEvent(BaseModel):
    """Text was appended to the output, or to completion `index` of a job with several."""

    event: Literal["token"] = "token"
    attempt: int
    offset: int
    text: str
    token_ids: list[int] = []
    index: int = 0
    position: int | None = None
    """Tokens of its completion before these."""
    logprobs: list[TokenLogprob] | None = None
    """One for each token, if the job asks for them."""


JobEvent = Annotated[StateEvent | TokenEvent, Field(discriminator="event")]
job_event: TypeAdapter[StateEvent | TokenEvent] = TypeAdapter(JobEvent)
