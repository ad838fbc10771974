"""A model's text side in one self-contained value, so that the door can have it without the model."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class TextBundle:
    """Everything that turns messages and text into token ids and back."""

    tokenizer_json: str
    """The `tokenizers` library's serialisation."""
    chat_template: str | None
    """Jinja source, as in `tokenizer_config.json`."""
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a text: from the generation config and the tokenizer, resolved once."""
    add_bos: bool
    """Whether a raw prompt gets a BOS token in front. A templated chat never does."""
    vocab_size: int
    """Ids at or above it are never sampled, even if the head has more rows."""

    def to_bytes(self) -> bytes:
        """Compressed JSON, for the model cache and the ledger; equal bundles give equal bytes."""
        fields = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return zlib.compress(fields.encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> TextBundle:
        """The inverse of `to_bytes`."""
        fields = json.loads(zlib.decompress(data))
        return cls(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})
