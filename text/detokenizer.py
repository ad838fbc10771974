"""Token ids to text as they come: complete characters only, and only the output's own."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of an output, token by token, in time that doesn't grow with its length.

    A character that began in the prompt belongs to the output if the output completes it; otherwise
    its first bytes are forgotten. Bytes that can't form a character become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._pieces = tokenizer.pieces
        self._decoder = _Utf8("replace")
        tail, shown = self._prompt_tail(prompt_token_ids)
        self._join: _Join | None = _Join(tail) if tail else None
        self._strip_space = bool(prompt_token_ids) and not shown and self._pieces.strips_first_space

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        data = self._pieces[token_id]
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        if self._join is not None:
            joined = self._join.push(data)
            if joined is None:
                return ""
            self._join = None
            data = joined
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: one U+FFFD for an incomplete character, else nothing."""
        rest = self._join.whole if self._join is not None and self._join.output else b""
        self._join = None
        return self._decoder.decode(rest, final=True)

    def _prompt_tail(self, token_ids: Sequence[int]) -> tuple[bytes, bool]:
        """Bytes of an incomplete character at the prompt's end, and whether the prompt has any text."""
        end = b""
        for token_id in reversed(token_ids):
            end = self._pieces[token_id] + end
            if len(end) >= 4:
                break
        for length in range(1, min(3, len(end)) + 1):
            tail = end[-length:]
            if tail[0] >= 0xC0:
                return (tail if _is_incomplete(tail) else b""), True
        return b"", bool(end)


def _is_incomplete(data: bytes) -> bool:
    """Whether `data` may still become one character."""
    try:
        return _Utf8("strict").decode(data) == ""
    except UnicodeDecodeError:
        return False


class _Join:
    """The first bytes of an output whose prompt ended inside a character."""

    def __init__(self, tail: bytes) -> None:
        self._tail = tail
        self.output = b""

    @property
    def whole(self) -> bytes:
        return self._tail + self.output

    def push(self, data: bytes) -> bytes | None:
        """Bytes to decode from now on, or None while it is open whether the character gets complete."""
        self.output += data
        whole = self.whole
        for length in range(len(self._tail) + 1, min(len(whole), 4) + 1):
            if not _is_incomplete(whole[:length]):
                return whole if _is_character(whole[:length]) else self.output
        return None


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False
