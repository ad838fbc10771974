from __future__ import annotations

import codecs

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from text.detokenizer import Detokenizer
from text.pieces import PieceBytes, UnsupportedDecoder
from text.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), min_size=1, max_size=40)


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token_id) for token_id in output), detokenizer.flush()]


def whole_characters(data: bytes) -> str:
    """The characters that `data` holds completely; it may end inside one."""
    return codecs.getincrementaldecoder("utf-8")("strict").decode(data)


@given(text=TEXT)
def test_streamed_text_joined_is_the_whole_text(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, sentencepiece):
        prompt = tokenizer.encode_prompt("")
        deltas = stream(tokenizer, prompt, tokenizer.encode_prompt(text)[len(prompt) :])
        assert "".join(deltas) == text


@given(text=TEXT, data=st.data())
def test_a_text_cut_at_any_token_continues_where_the_prompts_last_whole_character_ended(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str, data: st.DataObject
) -> None:
    """https://github.com/vllm-project/vllm/issues/48853"""
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode_prompt(text)
        cut = data.draw(st.integers(1, len(ids)))
        before = b"".join(tokenizer.pieces[token_id] for token_id in ids[:cut])
        if tokenizer is sentencepiece:
            before = before.removeprefix(b" ")
        assert "".join(stream(tokenizer, ids[:cut], ids[cut:])) == text[len(whole_characters(before)) :]


@given(text=TEXT)
def test_no_delta_holds_part_of_a_character(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    """https://github.com/vllm-project/vllm/issues/8627"""
    for tokenizer in (byte_level, sentencepiece):
        deltas = stream(tokenizer, [], tokenizer.encode_prompt(text))
        assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas)
        assert deltas[-1] == ""


@given(data=st.data())
def test_any_token_ids_give_what_a_full_decode_gives(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 2), max_size=40))
    assert "".join(stream(byte_level, [], ids)) == byte_level.decode(ids)


@given(data=st.data())
def test_any_token_ids_after_a_prompt_of_whole_characters_extend_its_decode(
    byte_level: Tokenizer, data: st.DataObject
) -> None:
    prompt = byte_level.encode_prompt(data.draw(TEXT))
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40))
    assert byte_level.decode(prompt) + "".join(stream(byte_level, prompt, ids)) == byte_level.decode(prompt + ids)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    one = {tokenizer.pieces[i]: i for i in reversed(range(tokenizer.vocab_size)) if len(tokenizer.pieces[i]) == 1}
    return [one[bytes([byte])] for byte in data]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_an_incomplete_tail_appears_once_at_the_end(tokenizer: Tokenizer, kept: int) -> None:
    """https://github.com/vllm-project/vllm/issues/8627"""
    ids = byte_ids(tokenizer, b"a" + "🙂".encode()[:kept])
    assert stream(tokenizer, tokenizer.encode_prompt("x"), ids) == ["a", *[""] * kept, "\ufffd"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_prompts_half_character_is_shown_once_the_output_completes_it(tokenizer: Tokenizer, cut: int) -> None:
    """https://github.com/vllm-project/vllm/issues/48853"""
    ids = byte_ids(tokenizer, "é🙂!".encode())
    split = 2 + cut
    assert stream(tokenizer, ids[:split], ids[split:]) == [*[""] * (3 - cut), "🙂", "!", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_prompts_half_character_is_forgotten_if_the_output_goes_elsewhere(tokenizer: Tokenizer, cut: int) -> None:
    """https://github.com/vllm-project/vllm/issues/48853"""
    prompt = byte_ids(tokenizer, b"x" + "🙂".encode()[:cut])
    assert stream(tokenizer, prompt, byte_ids(tokenizer, b"ok")) == ["o", "k", ""]
    assert stream(tokenizer, prompt, []) == [""]


def test_the_prompts_half_character_and_the_outputs_part_of_it_are_one_replacement(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "🙂".encode())
    assert stream(tokenizer, ids[:1], ids[1:3]) == ["", "", "\ufffd"]


def test_special_tokens_and_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    assert stream(tokenizer, [], [end, tokenizer.vocab_size + 9, end]) == ["", "", "", ""]


def test_a_space_after_the_prompt_is_kept(sentencepiece: Tokenizer) -> None:
    prompt = sentencepiece.encode_prompt("The")
    output = sentencepiece.encode_prompt("dog")[1:]
    assert "".join(stream(sentencepiece, prompt, output)) == " dog"


def test_the_tokenizers_own_space_before_a_text_that_follows_only_bos_is_not_shown(sentencepiece: Tokenizer) -> None:
    bos, *output = sentencepiece.encode_prompt("dog")
    assert "".join(stream(sentencepiece, [bos], output)) == "dog"


def test_a_metaspace_decoder_is_understood() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁the": 0, "▁dog": 1, "s": 2}, unk_token="s"))
    pieces = PieceBytes(inner, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}, frozenset())
    assert [pieces[i] for i in range(3)] == [b" the", b" dog", b"s"]
    assert pieces.strips_first_space


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece"}, {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}]
)
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: dict[str, object] | None) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UnsupportedDecoder):
        PieceBytes(inner, decoder, frozenset())[0]


def test_an_added_token_with_a_space_is_plain_text(byte_level: Tokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(byte_level.bundle.tokenizer_json)
    inner.add_tokens(["two words"])
    token_id = inner.token_to_id("two words")
    assert token_id is not None
    assert PieceBytes(inner, {"type": "ByteLevel"}, frozenset())[token_id] == b"two words"
