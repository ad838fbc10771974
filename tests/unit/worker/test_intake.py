"""Messages become claims, or are refused with a reason that repeats nothing of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from headrace.contract import Reason, new_job_id

from worker.failures import Malformed
from worker.intake import raw_text, read_claim, rejected_id

ID = "0198c0de-0000-7000-8000-000000000001"


def test_a_job_id_alone_names_a_job_of_the_ledger() -> None:
    claim = read_claim("any task", [], {"job_id": ID}, "fake")
    assert (claim.job_id, claim.request) == (ID, None)


def test_a_whole_request_is_a_job_under_the_tasks_id() -> None:
    claim = read_claim(ID, [], {"model": "fake", "prompt": "hi"}, "fake")
    assert claim.job_id == ID
    assert claim.request is not None
    assert claim.request.prompt == "hi"


@pytest.mark.parametrize(
    ("task_id", "args", "kwargs", "reason", "text"),
    [
        (ID, ["hi"], {}, Reason.INVALID_REQUEST, "keyword arguments only"),
        (ID, [], {}, Reason.INVALID_REQUEST, "model: field required"),
        (ID, [], {"job_id": 5}, Reason.INVALID_REQUEST, "job_id: not a valid"),
        (ID, [], {"job_id": "a/b"}, Reason.INVALID_REQUEST, "job_id: not a valid"),
        (ID, [], {"job_id": ID, "prompt": "hi"}, Reason.INVALID_REQUEST, "job_id: unknown field"),
        (ID, [], {"model": "fake", "prompt": "hi", "top_p": "s3cret"}, Reason.INVALID_REQUEST, "top_p: "),
        (ID, [], {"model": "other", "prompt": "hi"}, Reason.MODEL_NOT_FOUND, "'other' is not on this queue"),
        ("a b", [], {"model": "fake", "prompt": "hi"}, Reason.INVALID_REQUEST, "the task's id"),
    ],
)
def test_what_is_wrong_is_said(
    task_id: str, args: list[Any], kwargs: dict[str, Any], reason: Reason, text: str
) -> None:
    with pytest.raises(Malformed, match=text) as refused:
        read_claim(task_id, args, kwargs, "fake")
    assert refused.value.reason is reason
    assert "s3cret" not in str(refused.value)


def test_a_rejection_keeps_the_messages_id_if_it_can_be_one() -> None:
    assert rejected_id(ID) == ID
    for odd in ("a b", 17, None, ""):
        assert len(rejected_id(odd)) == len(new_job_id())


def test_the_raw_text_is_bounded() -> None:
    assert len(raw_text([], {"prompt": "x" * 10**6})) == 100_000
