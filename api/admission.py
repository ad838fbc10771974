"""Refuses at the door what no worker could run, by the model's own tokenizer and numbers."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from anyio import CapacityLimiter, to_thread
from headrace.contract import JobRequest, ModelCard
from headrace.errors import NotFound
from headrace.validation import invalid

from api.threads import LedgerThreads
from ledger.contract import LedgerProtocol
from text.bundle import TextBundle
from text.limits import PromptRefused, check_adapter, check_prompt
from text.parameters import check_parameters
from text.tokenizer import Tokenizer

CARDS_TTL_S = 2.0
KEPT_TOKENIZERS = 8


class Admission:
    """Model cards and tokenizers of the models that workers have registered, kept by revision."""

    def __init__(self, ledger: LedgerProtocol, threads: LedgerThreads) -> None:
        self._ledger = ledger
        self._threads = threads
        self._encoding = CapacityLimiter(2)
        self._cards: dict[str, ModelCard] = {}
        self._read_s = float("-inf")
        self._tokenizers: dict[tuple[str, str], Tokenizer] = {}
        self._loading = asyncio.Lock()

    async def cards(self, *, fresh: bool = False) -> dict[str, ModelCard]:
        """The registered models by name, read again after two seconds."""
        if fresh or time.monotonic() - self._read_s > CARDS_TTL_S:
            self._cards = await self._threads.call(self._ledger.models)
            self._read_s = time.monotonic()
        return self._cards

    async def check(self, request: JobRequest) -> int:
        """The most tokens that it may take. Raises NotFound for an unknown model, BadRequest for what it can't run."""
        card = await self.card(request.model)
        if request.messages is not None and not card.chat:
            raise invalid(f"model {card.id!r} has no chat template: give a prompt", "messages")
        tokenizer = await self._tokenizer(card)
        try:
            return await to_thread.run_sync(partial(_check, request, card, tokenizer), limiter=self._encoding)
        except PromptRefused as refused:
            raise invalid(str(refused), refused.param, refused.code) from None

    async def card(self, model: str) -> ModelCard:
        cards = await self.cards()
        if model not in cards:
            cards = await self.cards(fresh=True)
        if model not in cards:
            known = ", ".join(sorted(cards)) or "none yet: no worker has started"
            raise NotFound(
                f"no worker has registered model {model!r}; known models: {known}",
                type="invalid_request_error",
                param="model",
                code="model_not_found",
                status=404,
            )
        return cards[model]

    async def _tokenizer(self, card: ModelCard) -> Tokenizer:
        key = (card.id, card.revision)
        async with self._loading:
            if key not in self._tokenizers:
                tokenizer = await self._threads.call(self._load, card.id)
                while len(self._tokenizers) >= KEPT_TOKENIZERS:
                    del self._tokenizers[next(iter(self._tokenizers))]
                self._tokenizers[key] = tokenizer
            return self._tokenizers[key]

    def _load(self, model: str) -> Tokenizer:
        data = self._ledger.text_bundle(model)
        if data is None:
            raise LookupError(f"model {model!r} is registered without its text bundle")
        return Tokenizer(TextBundle.from_bytes(data))


def _check(request: JobRequest, card: ModelCard, tokenizer: Tokenizer) -> int:
    """Tokens that it may take at most. Raises `PromptRefused` for what this model can't run: the engine asks the same
    functions."""
    check_adapter(request.adapter, card.adapters)
    tokens = check_prompt(
        tokenizer,
        prompt=request.prompt,
        messages=None if request.messages is None else [m.model_dump() for m in request.messages],
        max_tokens=0 if request.embed else request.max_tokens,
        max_seq_len=card.max_seq_len,
        whole=request.embed,
    )
    if request.embed:
        return len(tokens)
    check_parameters(
        request,
        prompt_tokens=len(tokens),
        max_seq_len=card.max_seq_len,
        vocab_size=card.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    return len(tokens) + request.n * min(request.max_tokens, card.max_seq_len - len(tokens))
