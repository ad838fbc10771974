from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.model.gguf_file import GGUFFile
from engine.model.gguf_text import text_from_gguf
from engine.model.spec import UnsupportedModel
from tests.unit.engine.model.gguf_writing import TOKENS, tokenizer_metadata
from text.bundle import TextBundle


def bundle(tokens: list[str] | None = None, **changes: Any) -> TextBundle:
    metadata = tokenizer_metadata(tokens, **{f"tokenizer__ggml__{name}": value for name, value in changes.items()})
    return text_from_gguf({name.replace("__", "."): value for name, value in metadata.items()})


def pieces(text: str, tokens: list[str] | None = None, **changes: Any) -> list[str]:
    tokenizer = Tokenizer.from_str(bundle(tokens, **changes).tokenizer_json)
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


ALPHABET = [*TOKENS, "Ġ1", "ĠĠ", "12"]


class TestWords:
    def test_merges_apply_inside_a_word(self) -> None:
        assert pieces("abc a") == ["abc", "Ġa"]

    def test_control_tokens_are_whole_and_special(self) -> None:
        assert pieces("ab<|im_end|>a") == ["ab", "<|im_end|>", "a"]
        tokenizer = Tokenizer.from_str(bundle().tokenizer_json)
        assert tokenizer.decode(tokenizer.encode("ab<|im_end|> a").ids) == "ab a"

    def test_smollm_cuts_each_digit_before_all_else(self) -> None:
        merges = ["Ġ 1", "1 2", "Ġ Ġ"]
        assert pieces("a  12", ALPHABET, pre="smollm", merges=merges) == ["a", "ĠĠ", "1", "2"]
        assert pieces("a  12", ALPHABET, pre="gpt-2", merges=merges) == ["a", "Ġ", "Ġ1", "2"]

    def test_llama_keeps_three_digits_together_and_takes_known_words_whole(self) -> None:
        merges = ["1 2"]
        assert pieces("1212", ALPHABET, pre="llama-bpe", merges=merges) == ["12", "1", "2"]
        assert pieces("abc", pre="llama-bpe", merges=[]) == ["abc"]
        assert pieces("abc", pre="gpt-2", merges=[]) == ["a", "b", "c"]

    def test_qwen_cuts_digits_and_composes_accents(self) -> None:
        assert pieces("12", ALPHABET, pre="qwen2", merges=["1 2"]) == ["1", "2"]
        composed = Tokenizer.from_str(bundle(pre="qwen2").tokenizer_json).normalizer.normalize_str("e\u0301")
        assert composed == "\u00e9"

    @pytest.mark.parametrize(
        ("changes", "said"),
        [({"model": "llama"}, "kind 'llama'"), ({"pre": "tekken"}, "'tekken'.*Use the model's Hugging Face directory")],
    )
    def test_other_tokenizers_are_refused(self, changes: dict[str, str], said: str) -> None:
        with pytest.raises(UnsupportedModel, match=said):
            bundle(**changes)


class TestEnds:
    def test_the_named_one_and_the_known_control_tokens(self) -> None:
        assert bundle().eos_token_ids == (0, 2)
        assert bundle(eos_token_id=5, eot_token_id=7).eos_token_ids == (0, 2, 5, 7)

    def test_a_plain_token_of_such_a_name_ends_nothing(self) -> None:
        assert bundle(token_type=[1] * len(TOKENS)).eos_token_ids == (2,)

    def test_names(self) -> None:
        text = bundle()
        assert (text.bos_token, text.eos_token) == ("<|im_start|>", "<|im_end|>")


class TestBos:
    @pytest.mark.parametrize(
        ("changes", "added"),
        [
            ({}, False),
            ({"pre": "llama-bpe"}, True),
            ({"pre": "llama-bpe", "add_bos_token": False}, False),
            ({"add_bos_token": True}, True),
        ],
    )
    def test_the_file_decides_and_else_the_family(self, changes: dict[str, Any], added: bool) -> None:
        assert bundle(**changes).add_bos is added


def test_unused_ids_at_the_end_are_not_part_of_the_vocabulary() -> None:
    tokens = [*TOKENS, "[PAD12]", "[PAD13]"]
    text = bundle(tokens, token_type=[3] * 3 + [1] * (len(TOKENS) - 3) + [5, 5])
    assert text.vocab_size == len(TOKENS)
    assert Tokenizer.from_str(text.tokenizer_json).token_to_id("[PAD12]") is None


CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "  leading, trailing  \n\n\n and\tinner   whitespace \r\n",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 22, 333]}  # comment\n",
    "a  1 b   22  ½ Ⅷ",
    "In 1984 he paid $12,345.67 for 3 of them (v2.0.1-rc3).",
    "naïve café, Ελληνικά, Русский, 日本語テキスト, 한국어, עברית, العربية, हिन्दी",
    "😀👩‍👩‍👧‍👦🇩🇪 e\u0301 ﬁ Ⅷ ½ \u200b\u00a0\u3000|",
    "I'll we've can't 'tis O'Neill's SHE'S",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    "\x00\x01\x7f\ufffd",
    "",
]


@pytest.fixture(scope="module")
def ours(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_str(GGUFFile(demo_model).text.tokenizer_json)


@pytest.fixture(scope="module")
def theirs(demo_model: Path) -> Tokenizer:
    """transformers' own conversion, which takes this family's pre-tokenizer for GPT-2's, with that put right.

    The original cuts each digit first. It shows before numbers only: `a  1`, ` ½`.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as Splits
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model.parent, gguf_file=demo_model.name).backend_tokenizer
    tokenizer.pre_tokenizer = Splits([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    return tokenizer


@pytest.mark.slow
@pytest.mark.model
class TestDemoModel:
    @pytest.mark.parametrize("text", CORPUS)
    def test_encodes_as_transformers_does(self, ours: Tokenizer, theirs: Tokenizer, text: str) -> None:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids

    @pytest.mark.parametrize("text", CORPUS)
    def test_decodes_what_it_encodes(self, ours: Tokenizer, text: str) -> None:
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
