from __future__ import annotations

from datetime import UTC, datetime

import pytest
from headrace.contract import JobRequest, Message, job_kwargs
from headrace.errors import BadRequest
from headrace.params import JobParams, new_request


def test_the_typed_arguments_are_the_fields_of_a_request() -> None:
    assert {*JobParams.__annotations__, "model", "prompt", "messages"} == set(JobRequest.model_fields)


def test_only_what_was_given_is_sent() -> None:
    assert job_kwargs(new_request("m", "hi", None, {"top_k": 3})) == {"model": "m", "prompt": "hi", "top_k": 3}


def test_messages_may_be_objects_or_dicts() -> None:
    request = new_request("m", None, [Message(role="system", content="a"), {"role": "user", "content": "b"}], {})
    assert job_kwargs(request)["messages"] == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
    ]


def test_token_ids_may_come_in_any_sequence() -> None:
    assert new_request("m", range(3), None, {}).prompt == [0, 1, 2]


def test_a_deadline_becomes_json() -> None:
    request = new_request("m", "x", None, {"deadline": datetime(2031, 1, 2, tzinfo=UTC)})
    assert job_kwargs(request)["deadline"] == "2031-01-02T00:00:00Z"


def test_a_wrong_argument_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(BadRequest) as caught:
        new_request("m", "x", None, {"temperature": float("nan")})
    assert (caught.value.param, caught.value.status) == ("temperature", 400)
