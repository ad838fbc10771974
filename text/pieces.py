"""The bytes that each token stands for, so that text can be put together without decoding twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

Piece = Callable[[str], bytes]


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder joins tokens in a way that no byte string per token can express."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:  # an added token holds plain text
        return token.encode()


def _stages(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _stages(inner)
    else:
        yield decoder


class PieceBytes:
    """Bytes of each token id, computed once when first asked for.

    Byte-level decoders map characters to bytes; sentencepiece-style ones write a space as a mark and
    a lone byte as `<0xE4>`. Special tokens and unknown ids stand for no bytes.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, decoder: dict[str, Any] | None, special_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._stages = list(_stages(decoder)) if decoder else []
        self._piece: Piece | None = None
        self._known: dict[int, bytes] = {}
        self.strips_first_space = any(
            stage["type"] == "Metaspace" or (stage["type"] == "Strip" and stage["content"] == " " and stage["start"])
            for stage in self._stages
        )
        """Whether a space that begins the whole text is the tokenizer's own and not shown."""

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes(token_id)
        return found

    def _bytes(self, token_id: int) -> bytes:
        if self._piece is None:
            self._piece = self._compile()
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._piece(token)

    def _compile(self) -> Piece:
        kinds = {stage["type"] for stage in self._stages}
        if kinds and kinds <= {"ByteLevel"}:
            return _byte_level
        if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return self._sentencepiece(byte_fallback="ByteFallback" in kinds)
        raise UnsupportedDecoder(f"no way is known to stream text from the decoder {sorted(kinds)}")

    def _sentencepiece(self, byte_fallback: bool) -> Piece:
        replaced: list[tuple[str, str]] = []
        for stage in self._stages:
            if stage["type"] == "Metaspace":
                replaced.append((stage["replacement"], " "))
            elif stage["type"] == "Replace":
                if "String" not in stage["pattern"]:
                    raise UnsupportedDecoder(f"no way is known to stream text from a Replace of {stage['pattern']}")
                replaced.append((stage["pattern"]["String"], stage["content"]))

        def piece(token: str) -> bytes:
            if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes.fromhex(token[3:5])
            for old, new in replaced:
                token = token.replace(old, new)
            return token.encode()

        return piece
