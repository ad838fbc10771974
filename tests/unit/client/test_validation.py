from __future__ import annotations

from typing import Any

import pytest
from headrace.contract import JobRequest
from headrace.errors import BadRequest
from headrace.validation import job_request
from pydantic import ValidationError

OK = {"model": "m", "prompt": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": "x"}, "model", "field required"),
        ({"model": "m"}, None, "exactly one of 'prompt' and 'messages'"),
        ({**OK, "messages": [{"role": "user", "content": "x"}]}, None, "exactly one of"),
        ({"model": "m", "prompt": ""}, "prompt", "at least 1 character"),
        ({"model": "m", "prompt": []}, "prompt", "at least 1 item"),
        ({"model": "m", "prompt": 1.5}, "prompt", "valid string, or input should be a valid list"),
        ({"model": "m", "prompt": [1, -1]}, "prompt.1", "greater than or equal to 0"),
        ({"model": "m", "prompt": [1, True]}, "prompt.1", "valid integer"),
        ({"model": "m", "messages": []}, "messages", "at least 1 item"),
        ({"model": "m", "messages": [{"role": "user"}]}, "messages.0.content", "field required"),
        ({"model": "m", "messages": [{"role": "user", "content": None}]}, "messages.0.content", "valid string"),
        ({"model": "m", "messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "'user'"),
        ({**OK, "stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({**OK, "stop": 7}, "stop", "valid string, or input should be a valid list"),
        ({**OK, "metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({**OK, "metadata": {"k" * 65: "v"}}, "metadata." + "k" * 65, "at most 64"),
        ({**OK, "best_of": 2}, "best_of", "unknown field"),
        ({**OK, "n": 17}, "n", "less than or equal to 16"),
        ({**OK, "n": True}, "n", "valid integer"),
        ({**OK, "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({**OK, "prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ({**OK, "repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({**OK, "presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({**OK, "frequency_penalty": float("nan")}, "frequency_penalty", "finite"),
        ({**OK, "logit_bias": {"x": 1}}, "logit_bias.x", "valid integer"),
        ({**OK, "logit_bias": {"-1": 1}}, "logit_bias.-1", "greater than or equal to 0"),
        ({**OK, "logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
        ({**OK, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 token ids, got 1025"),
        ({**OK, "bad_words": [" "]}, "bad_words.0", "pattern"),
        ({**OK, "allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({**OK, "response_format": {"type": "yaml"}}, "response_format", "'json_object'"),
        ({**OK, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "field required"),
        (
            {**OK, "response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
            "valid dictionary",
        ),
        ({**OK, "response_format": {"type": "json_object"}, "guided_regex": "a"}, None, "follows one grammar"),
        ({**OK, "guided_choice": []}, "guided_choice", "at least 1 item"),
        ({**OK, "guided_choice": ["a", ""]}, "guided_choice.1", "at least 1 character"),
        ({**OK, "foo.bar": 2}, "foo.bar", "unknown field"),
        ({**OK, "max_tokens": True}, "max_tokens", "valid integer"),
        ({**OK, "max_tokens": 1, "min_tokens": 2}, None, "min_tokens (2) is greater than max_tokens (1)"),
        ({**OK, "deadline": "2031-01-01T00:00:00"}, "deadline", "timezone"),
        ({**OK, "deadline": "9999-12-31T23:59:59Z"}, "deadline", "out of range"),
        ({**OK, "deadline": "2031-01-01T00:00:00Z", "ttl_s": 1}, None, "at most one of"),
        ({**OK, "temperature": float("inf")}, "temperature", "finite"),
        ({**OK, "prompt": "\ud800"}, "prompt", "unicode"),
        ({**OK, "metadata": {"\ud800": "x"}}, "metadata", "unicode"),
        ({**OK, 1: 2}, None, "string"),
        ([OK], None, "must be a JSON object"),
        ("x", None, "must be a JSON object"),
    ],
)
def test_the_field_is_named_as_it_was_written(fields: Any, param: str | None, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        job_request(fields)
    assert caught.value.param == param
    assert says in caught.value.message
    assert "constrained" not in caught.value.message
    caught.value.message.encode()


def test_several_faults_are_all_told_and_the_first_is_named() -> None:
    with pytest.raises(BadRequest) as caught:
        job_request({**OK, "temperature": -1, "top_p": 2, "colour": "red"})
    assert caught.value.param == "temperature"
    for field in ("temperature: ", "top_p: ", "colour: "):
        assert field in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [-1] * 100_000},
        {"messages": [{"role": "nobody"}] * 10_000},
        {"prompt": "x", "metadata": {str(i): i for i in range(100_000)}},
        {"prompt": "x", "logit_bias": {str(i): "no" for i in range(100_000)}},
        {"prompt": "x", "allowed_token_ids": [-1] * 100_000},
        {"prompt": "x", "guided_choice": [""] * 100_000},
        {"prompt": "x", **{f"unknown{i}": i for i in range(100_000)}},
    ],
)
def test_a_hundred_thousand_faults_are_not_told_one_by_one(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate({"model": "m", **fields})
    assert caught.value.error_count() < 10
    with pytest.raises(BadRequest) as told:
        job_request({"model": "m", **fields})
    assert len(told.value.message) < 1000


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "ttl_s", "ignore_eos", "stream"])
@pytest.mark.parametrize("value", ["1", [1]])
def test_numbers_and_truths_are_not_read_out_of_texts(field: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        job_request({**OK, field: value})
    assert caught.value.param == field
