"""Text to token ids and back, on the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import tokenizers

from text.bundle import TextBundle
from text.chat import ChatTemplate
from text.pieces import PieceBytes


class TokenText(NamedTuple):
    """A token as people see it. `data` are its bytes; `text` has U+FFFD where they are no whole character."""

    text: str
    data: bytes


class Tokenizer:
    """A model's tokenizer and chat template. Safe to share between threads."""

    def __init__(self, bundle: TextBundle) -> None:
        self.bundle = bundle
        self._tokenizer = tokenizers.Tokenizer.from_str(bundle.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._chat = ChatTemplate(bundle.chat_template, bundle.bos_token, bundle.eos_token)
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.vocab_size = bundle.vocab_size
        self.eos_token_ids = bundle.eos_token_ids
        self.bos_token_id = None if bundle.bos_token is None else self._tokenizer.token_to_id(bundle.bos_token)
        if bundle.add_bos and self.bos_token_id is None:
            raise ValueError(f"the tokenizer adds a BOS token but doesn't know {bundle.bos_token!r}")
        self._shown: dict[int, TokenText] = {}
        state: bytes | None = self._tokenizer.decoder and self._tokenizer.decoder.__getstate__()
        self.pieces = PieceBytes(self._tokenizer, json.loads(state) if state else None, self._special_ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a raw prompt, after a BOS token if the model wants one."""
        ids = self.encode_text(text)
        return [self.bos_token_id, *ids] if self.bundle.add_bos and self.bos_token_id is not None else ids

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of a text that nothing will follow, with all that the tokenizer puts around one."""
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=True)
        bare = self.encode_text(text)
        return encoding.ids if len(encoding.ids) > len(bare) else self.encode_prompt(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a templated chat; the template alone places special tokens. Raises `TemplateError`."""
        return self.encode_text(self._chat.render(messages))

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry."""
        return self._tokenizer.token_to_id(token)

    def encode_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word as it stands at the beginning of a text, and after a space."""
        spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
        return tuple(dict.fromkeys(tuple(self.encode_text(spelling)) for spelling in spellings))

    def show(self, token_id: int) -> TokenText:
        """One token by itself; a special one by its name."""
        found = self._shown.get(token_id)
        if found is None:
            name = self._tokenizer.id_to_token(token_id) if token_id in self._special_ids else None
            data = self.pieces[token_id] if name is None else name.encode()
            found = self._shown[token_id] = TokenText(data.decode(errors="replace"), data)
        return found

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text by itself: nothing is added to it."""
        # Unlike `encode`, this one lets other threads run, and takes no account of offsets.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def encode_literally(self, text: str) -> list[int]:
        """The same, but the name of a special token stands for its letters."""
        [encoding] = self._literal.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer
