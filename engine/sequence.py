"""A request as the scheduler sees it: tokens known, tokens computed, pages held. No torch here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.memory import Page, page_hash
from engine.params import SamplingParams
from engine.pooling import Pooling
from engine.rules import TokenRules
from engine.speculation import PromptLookup
from kernels.sampling import GREEDY_TEMPERATURE


class RowSampling(NamedTuple):
    """How a sequence's next token is chosen, in the terms of `kernels.sampling.SamplingBatch`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

    @classmethod
    def of(cls, params: SamplingParams) -> RowSampling:
        """A request's parameters; all greedy ones become the same, and a seed is drawn if none was given."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        cold = params.temperature < GREEDY_TEMPERATURE
        if cold or params.top_k == 1 or params.top_p == 0 or params.min_p == 1:
            return GREEDY._replace(seed=seed)
        return cls(params.temperature, max(params.top_k, 0), params.top_p, params.min_p, seed)


GONE = Page(0)
"""Stands in a block table for a page that is never read again."""
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(slots=True, eq=False, weakref_slot=True)
class TokenSequence:
    """Tokens on their way through the model.

    The scheduler gives and takes its pages, and sets `computed` to 0 when it takes them; the engine
    alone advances `computed` and appends to `tokens`.
    """

    id: str
    tokens: list[int]
    """Every token known: the prompt, then what was generated."""
    prompt_tokens: int
    max_len: int
    """Most tokens that it may ever know."""
    priority: int = 0
    """As it came; lower is more urgent."""
    tenant: str = "default"
    deadline_s: float | None = None
    """Moment of the engine's clock after which it isn't wanted."""
    arrival: int = 0
    """Counts requests in order of arrival; kept when preempted."""
    level: int = field(init=False)
    """Its class: the priority, less what it gained by waiting. Changes at its admission only."""
    waits_since_s: float = 0.0
    adapter: int = 0
    """Which of the model's adapters computes it, counted from 1; 0 for none."""
    sampling: RowSampling = GREEDY
    end_ids: tuple[int, ...] = ()
    """Token ids that end it."""
    ends_from: int = 0
    """Known tokens before which nothing may end it."""
    rules: TokenRules | None = None
    """What else decides on its next token."""
    logprobs: int = -1
    """Likeliest tokens to report beside each one of the output, -1 to report nothing."""
    prompt_logprobs: int = -1
    """The same for the prompt."""
    scored: int = 1
    """Prompt tokens whose logprobs are known, or never will be: the first one's."""
    computed: int = 0
    """Tokens whose KV is written."""
    ahead: int = 0
    """Tokens behind them whose KV steps under way write."""
    coming: int = 0
    """Tokens behind the known ones that steps under way choose and that are to be computed, too: 0 or 1."""
    stays: int = 0
    """How often it has left those who run: what was launched for an earlier stay is nobody's."""
    pages: list[Page] = field(default_factory=list)
    """In the order of its tokens; `GONE` where one was given back."""
    gone_pages: int = 0
    """Of its pages, from the first, those that no token will see any more and that were given back."""
    evicted: int = 0
    """Computed tokens that aren't kept (`engine.compression`): later ones stand so many slots before their position."""
    preemptions: int = 0
    root: bytes | None = None
    """Parent of its first page's hash: its pages are shared with sequences of the same one; None shares nothing.

    None if its prompt is scored, or its vector is made of all tokens: that takes every row.
    """
    hashes: list[bytes] = field(default_factory=list)
    """Of its full pages, as far as they were asked for."""
    shared_pages: int = 0
    """Of its pages, from the first, those that others may find."""
    saved_tokens: int = 0
    """Tokens computed when its KV was copied to the host's memory, where it waits for its return."""
    saved_evicted: int = 0
    """Of those, the ones that were not kept."""
    pooling: Pooling | None = None
    """How a vector is made of it, if that is what it is for."""
    pooled: int = 0
    """Tokens whose last hidden states are in that vector, or never will be."""
    cached_tokens: int = 0
    """Tokens that it found computed when it was first admitted."""
    drafts: list[int] = field(default_factory=list)
    """Tokens that this step computes after the known ones, on the guess that they come next."""
    lookup: PromptLookup | None = None
    """Where the guesses come from, once there was one to make."""

    def __post_init__(self) -> None:
        self.level = self.priority

    @property
    def rank(self) -> tuple[int, int]:
        """What runs first has the lowest."""
        return self.level, self.arrival

    @property
    def held_pages(self) -> list[Page]:
        """Its pages but for those that it gave back."""
        return self.pages[self.gone_pages :] if self.gone_pages else self.pages

    @property
    def kv_tokens(self) -> int:
        """Most tokens whose KV it may ever need: the last token generated is never read."""
        return max(self.prompt_tokens, self.max_len - 1)

    @property
    def slots(self) -> int:
        """Places in its pages that are taken: of the computed tokens those that are kept."""
        return self.computed - self.evicted

    @property
    def remaining(self) -> int:
        """Tokens that are known, or come, and that no step computes yet: 1 when decoding."""
        return len(self.tokens) + self.coming - self.computed - self.ahead

    def page_hashes(self, page_size: int) -> list[bytes]:
        """The chained hashes of all full pages of its known tokens; `root` must be set."""
        assert self.root is not None
        for index in range(len(self.hashes), len(self.tokens) // page_size):
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(page_hash(parent, self.tokens[index * page_size : (index + 1) * page_size]))
        return self.hashes

    @property
    def banned(self) -> tuple[int, ...]:
        """Token ids that may not come next."""
        return self.end_ids if len(self.tokens) + self.coming < self.ends_from else ()

    @property
    def guessable(self) -> bool:
        """Whether its next tokens are chosen by what `sampling` says and nothing else."""
        plain = self.rules is None and self.logprobs < 0 and self.prompt_logprobs < 0
        return plain and len(self.tokens) + self.coming >= self.ends_from

    @property
    def complete(self) -> bool:
        """Whether all is computed, and nothing may come after it: its prompt was to be scored or embedded, no more."""
        return self.computed == len(self.tokens) == self.max_len

    @property
    def needs_nothing(self) -> bool:
        """Whether there is nothing to compute for it: no token may come, no prompt is to be scored, no vector made."""
        return self.max_len == self.prompt_tokens and self.prompt_logprobs < 0 and self.pooling is None

    def unpooled(self, start: int, end: int) -> range:
        """Tokens of `start : end` whose last hidden states are to be taken; not twice after a preemption."""
        if self.pooling is None:
            return range(0)
        return self.pooling.tokens(max(start, self.pooled), end, self.prompt_tokens)

    def unscored(self, start: int, end: int) -> range:
        """Prompt tokens that rows `start : end` score for the first time; row i scores token i + 1."""
        if self.prompt_logprobs < 0:
            return range(0)
        return range(self.scored, min(end + 1, self.prompt_tokens)) if start < self.scored <= end else range(0)
