from __future__ import annotations

from typing import Any

import pytest
from headrace.contract import JobRequest, Reason

from text.limits import PromptRefused
from text.parameters import MOST_REPORTED, check_parameters


def check(prompt_tokens: int = 10, max_seq_len: int = 100, **asked: Any) -> None:
    check_parameters(
        JobRequest(model="m", prompt="x", **{"max_tokens": 50, **asked}),
        prompt_tokens=prompt_tokens,
        max_seq_len=max_seq_len,
        vocab_size=1000,
        eos_token_ids=(2, 3),
    )


def refused(**asked: Any) -> PromptRefused:
    with pytest.raises(PromptRefused) as caught:
        check(**asked)
    assert caught.value.code == Reason.INVALID_REQUEST
    return caught.value


@pytest.mark.parametrize("bad", [1000, 2**40])
@pytest.mark.parametrize("param", ["stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_every_list_of_ids_is_checked_against_the_vocabulary(param: str, bad: int) -> None:
    """https://github.com/vllm-project/vllm/issues/6866"""
    given: Any = {5: 1.0, bad: 1.0} if param == "logit_bias" else [5, bad]
    error = refused(**{param: given})
    assert error.param == param
    assert str(error) == f"{param}: token id {bad} is outside the vocabulary of 1000"
    check(**{param: {999: 1.0} if param == "logit_bias" else [0, 999]})


def test_a_minimum_that_no_allowed_token_can_fill_is_refused() -> None:
    error = refused(allowed_token_ids=[2, 3, 9], stop_token_ids=[9], min_tokens=1)
    assert (error.param, "min_tokens=1" in str(error)) == ("allowed_token_ids", True)
    check(allowed_token_ids=[2, 3, 9], min_tokens=1)
    check(allowed_token_ids=[2, 3], min_tokens=1, ignore_eos=True)
    check(allowed_token_ids=[2, 3])


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ({"logprobs": 20, "max_tokens": 4000}, 4000 * 21),
        ({"logprobs": 0, "n": 16, "max_tokens": 10**9}, 16 * 8182),
        ({"prompt_logprobs": 20, "prompt_tokens": 8000, "max_tokens": 0}, 8000 * 21),
    ],
)
def test_a_result_of_any_size_is_refused_with_both_numbers(asked: dict[str, Any], reported: int) -> None:
    error = refused(max_seq_len=8192, **asked)
    assert f"{reported} logprobs" in str(error)
    assert str(MOST_REPORTED) in str(error)
    assert error.param in asked


def test_what_the_context_cannot_hold_is_not_counted() -> None:
    check(max_tokens=10**9, logprobs=20)
    check(max_seq_len=8192, prompt_tokens=8192, max_tokens=0, prompt_logprobs=7)


def test_a_bad_grammar_is_refused_by_the_field_that_asks_for_it() -> None:
    error = refused(guided_regex="(")
    assert error.param == "guided_regex"
    assert "guided_regex: " in str(error)
    check(guided_regex="a")
