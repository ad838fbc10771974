from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from headrace.contract import Reason

from text.bundle import TextBundle
from text.limits import PromptRefused, check_prompt, most_tokens
from text.tokenizer import Tokenizer


def refused(tokenizer: Tokenizer, **given: Any) -> PromptRefused:
    with pytest.raises(PromptRefused) as caught:
        check_prompt(tokenizer, **{"max_tokens": 1, "max_seq_len": 100, **given})
    assert caught.value.code in set(Reason)
    return caught.value


def test_a_prompt_that_fits_gives_its_token_ids(byte_level: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert check_prompt(byte_level, prompt="The dog", max_tokens=9, max_seq_len=100) == byte_level.encode_prompt(
        "The dog"
    )
    assert check_prompt(byte_level, messages=chat, max_tokens=9, max_seq_len=100) == byte_level.encode_chat(chat)
    assert check_prompt(byte_level, prompt=(5, 6), max_tokens=9, max_seq_len=100) == [5, 6]


@pytest.mark.parametrize("tokens", [11, 4000])
def test_an_over_long_prompt_is_refused_with_both_numbers(byte_level: Tokenizer, tokens: int) -> None:
    """https://github.com/vllm-project/vllm/issues/765, https://github.com/vllm-project/vllm/issues/1673"""
    for max_tokens in (0, 1):
        error = refused(byte_level, prompt=[5] * tokens, max_seq_len=10, max_tokens=max_tokens)
        assert (error.code, error.param) == ("context_length_exceeded", "prompt")
        assert str(tokens) in str(error)
        assert "10" in str(error)


def test_a_prompt_as_long_as_the_context_is_refused_unless_nothing_is_asked_for(byte_level: Tokenizer) -> None:
    """https://github.com/vllm-project/vllm/issues/16445"""
    assert refused(byte_level, prompt=[5] * 10, max_seq_len=10).code == "context_length_exceeded"
    assert len(check_prompt(byte_level, prompt=[5] * 10, max_seq_len=10, max_tokens=0)) == 10


def test_a_prompt_one_shorter_than_the_context_leaves_room_for_one_token(byte_level: Tokenizer) -> None:
    """https://github.com/vllm-project/vllm/issues/16445"""
    assert len(check_prompt(byte_level, prompt=[5] * 9, max_seq_len=10, max_tokens=500)) == 9
    assert most_tokens(9, 500, 10) == 1
    assert most_tokens(9, 0, 10) == 0
    assert most_tokens(4, 5, 10) == 5


@pytest.mark.parametrize("prompt", ["", (), []])
def test_an_empty_prompt_is_refused(byte_level: Tokenizer, prompt: Any) -> None:
    error = refused(byte_level, prompt=prompt)
    assert (error.code, str(error), error.param) == ("invalid_request", "the prompt is empty", "prompt")


@pytest.mark.parametrize("bad", [-1, "vocab_size", 2**40])
def test_ids_outside_the_vocabulary_are_refused(byte_level: Tokenizer, bad: Any) -> None:
    """https://github.com/vllm-project/vllm/issues/6866"""
    bad = byte_level.vocab_size if bad == "vocab_size" else bad
    error = refused(byte_level, prompt=(5, bad, 6))
    assert (error.code, error.param) == ("invalid_request", "prompt")
    assert str(bad) in str(error)
    assert str(byte_level.vocab_size) in str(error)


def test_text_whose_tokens_the_model_does_not_have_is_refused(byte_level_bundle: TextBundle) -> None:
    """A tokenizer file may hold more tokens than the model has rows."""
    tokenizer = Tokenizer(replace(byte_level_bundle, vocab_size=10))
    assert refused(tokenizer, prompt="The quick brown fox").code == "invalid_request"


def test_a_chat_without_a_template_is_refused(byte_level_bundle: TextBundle) -> None:
    tokenizer = Tokenizer(replace(byte_level_bundle, chat_template=None))
    error = refused(tokenizer, messages=[{"role": "user", "content": "hi"}])
    assert (error.code, error.param) == ("template_error", "messages")
    assert "no chat template" in str(error)


def test_a_template_that_refuses_gives_its_message(byte_level_bundle: TextBundle) -> None:
    tokenizer = Tokenizer(replace(byte_level_bundle, chat_template="{{ raise_exception('no system turn') }}"))
    error = refused(tokenizer, messages=[{"role": "system", "content": "hi"}])
    assert error.code == "template_error"
    assert "no system turn" in str(error)


@pytest.mark.parametrize("given", [{"prompt": "\ud83d"}, {"messages": [{"role": "user", "content": "\udc00"}]}])
def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer, given: Any) -> None:
    assert refused(byte_level, **given).code == "invalid_request"


def test_exactly_one_of_prompt_and_messages_is_wanted(byte_level: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert refused(byte_level).code == "invalid_request"
    assert refused(byte_level, prompt="x", messages=chat).code == "invalid_request"


@pytest.mark.parametrize("prompt", [3.5, ("a", "b"), (5, 6.0), [None], object()])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(byte_level: Tokenizer, prompt: Any) -> None:
    error = refused(byte_level, prompt=prompt)
    assert (error.code, error.param) == ("invalid_request", "prompt")
    assert "token ids" in str(error)


@pytest.mark.parametrize("messages", [("hi",), ({"role": "user", "content": 3},), ({"role": "user", "content": None},)])
def test_a_message_that_is_no_object_of_texts_is_refused(byte_level: Tokenizer, messages: Any) -> None:
    error = refused(byte_level, messages=messages)
    assert (error.code, error.param) == ("invalid_request", "messages")
