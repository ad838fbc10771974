"""From a message's arguments to a claim, or to the reason why it is no job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.contract import JobId, JobRequest, Name, Reason, new_job_id
from headrace.validation import bad_request
from pydantic import TypeAdapter, ValidationError

from ledger.contract import Claim
from worker.failures import Malformed

RAW_LIMIT_CHARS = 100_000
"""How much of a malformed message is kept."""
MOST_FIELDS = 100
"""More than any request has. Each one that is unknown costs the hub time, and a message can hold a million."""
MAX_BODY_BYTES = 32 * 2**20
"""The hub decodes a message in one piece; this is more than the longest prompt takes, however it is written."""

_job_id: TypeAdapter[str] = TypeAdapter(JobId)
_name: TypeAdapter[str] = TypeAdapter(Name)


def read_claim(task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], model: str) -> Claim:
    """`{"job_id": id}` names a job of the ledger; anything else is a whole request, and the task's id is the job's."""
    if args:
        raise Malformed(Reason.INVALID_REQUEST, f"the task takes keyword arguments only, got {len(args)} positional")
    if len(kwargs) > MOST_FIELDS:
        raise Malformed(
            Reason.INVALID_REQUEST,
            f"{len(kwargs)} fields, and a request has at most {MOST_FIELDS}",
            asked_model(kwargs),
        )
    if set(kwargs) == {"job_id"}:
        if not is_job_id(kwargs["job_id"]):
            raise Malformed(Reason.INVALID_REQUEST, "job_id: not a valid job id")
        return Claim(kwargs["job_id"])
    try:
        request = JobRequest.model_validate(dict(kwargs))
    except ValidationError as exc:
        raise Malformed(Reason.INVALID_REQUEST, _described(exc, kwargs), asked_model(kwargs)) from None
    if request.model != model:
        raise Malformed(Reason.MODEL_NOT_FOUND, f"model {request.model!r} is not on this queue", request.model)
    if not is_job_id(task_id):
        raise Malformed(Reason.INVALID_REQUEST, "the task's id is not a valid job id", request.model)
    return Claim(task_id, request)


def is_job_id(value: object) -> bool:
    try:
        _job_id.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def asked_model(kwargs: Mapping[str, Any]) -> str:
    """The model that a bad request names, if it is the name of one."""
    try:
        return _name.validate_python(kwargs.get("model"), strict=True)
    except ValidationError:
        return ""


def rejected_id(task_id: object) -> str:
    """The id under which a malformed message is recorded: its own if that can be one."""
    return str(task_id) if is_job_id(task_id) else new_job_id()


def _described(error: ValidationError, kwargs: Mapping[str, Any]) -> str:
    """What is wrong with a request, in the HTTP door's words, without any of what was in it."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return bad_request(found, dict(kwargs)).message


def raw_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The message as it is kept beside its rejection."""
    kept: list[str] = []
    left_chars = RAW_LIMIT_CHARS
    for piece in json.JSONEncoder(default=repr).iterencode({"args": list(args), "kwargs": dict(kwargs)}):
        kept.append(piece[:left_chars])
        left_chars -= len(kept[-1])
        if not left_chars:
            break
    return "".join(kept)
