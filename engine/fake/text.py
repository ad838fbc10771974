"""The fake model's vocabulary: bytes."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from text.bundle import TextBundle
from text.pieces import BYTE_OF

END_ID = 256
_SPECIAL = ("<|end|>", "<|system|>", "<|developer|>", "<|user|>", "<|assistant|>", "<|tool|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def fake_text() -> TextBundle:
    """A vocabulary of the 256 bytes, each its own id, and six special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(dict(BYTE_OF), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return TextBundle(
        tokenizer_json=tokenizer.to_str(),
        chat_template=_TEMPLATE,
        bos_token=None,
        eos_token=_SPECIAL[0],
        eos_token_ids=(END_ID,),
        add_bos=False,
        vocab_size=256 + len(_SPECIAL),
    )
