"""Real tokenizers, trained on the spot: byte-level as GPT-2's, and with a space mark and byte fallback as Llama's."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from text.bundle import TextBundle
from text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "Straßen, Äpfel und Öl; déjà vu, garçon, naïve; señor, ¿qué tal?",
    "你好，世界。今天天气很好。 こんにちは世界 안녕하세요",
    "🙂🙃👩‍👩‍👧‍👦 ok 👍🏽 1 2 3 10 100 1000",
    "def f(x):\n    return x + 1\n\n\tif (a < b) { c; }",
] * 3
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def bundle_of(tokenizer: tokenizers.Tokenizer, **changes: object) -> TextBundle:
    fields: dict[str, object] = {
        "tokenizer_json": tokenizer.to_str(),
        "chat_template": TEMPLATE,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "eos_token_ids": (1,),
        "add_bos": True,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    return TextBundle(**{**fields, **changes})  # type: ignore[arg-type]


def special() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in SPECIAL]


@pytest.fixture(scope="session")
def byte_level_bundle() -> TextBundle:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=alphabet, special_tokens=special()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return bundle_of(tokenizer)


@pytest.fixture(scope="session")
def sentencepiece_bundle() -> TextBundle:
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=special())
    learner.train_from_iterator([line for line in CORPUS if "好" not in line and "🙂" not in line], trainer)
    learned = learner.get_vocab()
    vocab = {token: token_id for token, token_id in learned.items() if token_id < len(SPECIAL)}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + sorted(learned, key=learned.__getitem__):
        vocab.setdefault(token, len(vocab))
    merges = [(left, right) for left, right in _merges(learner)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(special())
    return bundle_of(tokenizer)


def _merges(tokenizer: tokenizers.Tokenizer) -> list[list[str]]:
    import json

    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


@pytest.fixture(scope="session")
def byte_level(byte_level_bundle: TextBundle) -> Tokenizer:
    return Tokenizer(byte_level_bundle)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_bundle: TextBundle) -> Tokenizer:
    return Tokenizer(sentencepiece_bundle)


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Either of them."""
    found: Tokenizer = request.getfixturevalue(request.param)
    return found
