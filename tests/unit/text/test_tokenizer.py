from __future__ import annotations

from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from text.bundle import TextBundle
from text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "The lazy dog"}]


def test_a_raw_prompt_begins_with_bos_only_if_the_model_adds_it(byte_level_bundle: TextBundle) -> None:
    with_bos = Tokenizer(byte_level_bundle).encode_prompt("The dog")
    without = Tokenizer(replace(byte_level_bundle, add_bos=False)).encode_prompt("The dog")
    assert with_bos == [Tokenizer(byte_level_bundle).bos_token_id, *without]


def test_a_templated_chat_has_the_templates_bos_and_no_second_one(tokenizer: Tokenizer) -> None:
    """https://github.com/vllm-project/vllm/issues/27486"""
    ids = tokenizer.encode_chat(CHAT)
    assert ids.count(tokenizer.bos_token_id or 0) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_a_tokenizers_own_bos_is_not_added_to_a_chat(byte_level_bundle: TextBundle) -> None:
    """https://github.com/vllm-project/vllm/issues/27486: many tokenizer files prepend BOS in a post-processor."""
    inner = tokenizers.Tokenizer.from_str(byte_level_bundle.tokenizer_json)
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(replace(byte_level_bundle, tokenizer_json=inner.to_str()))
    assert tokenizer.encode_chat(CHAT).count(0) == 1
    assert tokenizer.encode_prompt("The dog").count(0) == 1


def test_special_tokens_in_a_template_become_single_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(CHAT)
    assert ids.count(tokenizer.token_to_id("<|im_start|>") or 0) == 2
    assert ids.count(tokenizer.token_to_id("<|im_end|>") or 0) == 1


def test_truncation_and_padding_in_the_file_are_ignored(byte_level_bundle: TextBundle) -> None:
    inner = tokenizers.Tokenizer.from_str(byte_level_bundle.tokenizer_json)
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    cut = Tokenizer(replace(byte_level_bundle, tokenizer_json=inner.to_str()))
    text = "The quick brown fox jumps over the lazy dog. " * 3
    assert cut.encode_prompt(text) == Tokenizer(byte_level_bundle).encode_prompt(text)
    assert cut.encode_prompt("x") == Tokenizer(byte_level_bundle).encode_prompt("x")


def test_a_bos_token_that_the_tokenizer_does_not_know_is_an_error(byte_level_bundle: TextBundle) -> None:
    with pytest.raises(ValueError, match="'<bos>'"):
        Tokenizer(replace(byte_level_bundle, bos_token="<bos>"))


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_the_round_trip(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, sentencepiece):
        if not (tokenizer is sentencepiece and "▁" in text):
            assert tokenizer.decode(tokenizer.encode_prompt(text)) == text


def test_a_word_is_encoded_as_it_begins_a_text_and_after_a_space(byte_level: Tokenizer) -> None:
    spellings = byte_level.encode_words(["dog", " dog", "lazy"])
    assert [byte_level.decode(spelling) for spelling in spellings] == ["dog", " dog", "lazy", " lazy"]
    assert byte_level.encode_words([]) == ()


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_the_bytes_of_shown_tokens_are_those_of_the_text(byte_level: Tokenizer, text: str) -> None:
    shown = [byte_level.show(token_id) for token_id in byte_level.encode_text(text)]
    assert b"".join(one.data for one in shown) == text.encode()
    assert all(one.text == one.data.decode(errors="replace") for one in shown)


def test_a_special_token_is_shown_by_its_name(tokenizer: Tokenizer) -> None:
    found = tokenizer.show(tokenizer.token_to_id("<|im_end|>") or 0)
    assert found == ("<|im_end|>", b"<|im_end|>")
