"""Following a job as server-sent events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header
from headrace.validation import invalid
from starlette.responses import StreamingResponse

from api.access import Reader, while_valid
from api.door import TheDoor
from api.errors import responses
from api.follow import Follower, is_stream_id
from api.routes.jobs import find

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

EXAMPLE = """event: state
data: {"event":"state","status":"running","attempt":1}

id: 1760000000000-0
event: token
data: {"event":"token","attempt":1,"offset":0,"text":"The sky","token_ids":[504,9145],"index":0}

id: 1760000000420-0
event: state
data: {"event":"state","status":"succeeded","attempt":1,"job":{}}
"""


@router.get(
    "/{id}/events",
    summary="Follow a job",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {"example": EXAMPLE}}, "description": "`state` and `token` events"},
        **responses(400, 404),
    },
)
async def events(
    door: TheDoor,
    caller: Reader,
    id: str,  # noqa: A002 - the name in the path
    last_event_id: Annotated[str | None, Header(description="Replay what came after this event")] = None,
) -> StreamingResponse:
    """States and tokens of a job from its beginning, as they come; the last event carries the whole job.

    A token's `offset` counts the characters of its completion (`index`) before it in its attempt; a `state` event with
    status `running` begins an attempt at offset 0. A reader that drops what it has already sees one text.
    """
    if last_event_id is not None and not is_stream_id(last_event_id):
        raise invalid("Last-Event-ID: not an id of one of this stream's events", "Last-Event-ID")
    follower = Follower(door, await find(door, caller, id), last_event_id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        while_valid(door, caller, follower.frames()), media_type="text/event-stream", headers=headers
    )
