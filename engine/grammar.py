"""Grammar-constrained decoding on llguidance: which tokens may come next so that the text follows its grammar.

Masks take some microseconds of a step, at most a few milliseconds in a state that was never met before;
those of one step are computed together, on several threads and without Python's lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from text.grammar import Grammar, GrammarError, told
from text.tokenizer import Tokenizer

KEPT_GRAMMARS = 128

LIMITS = LLParserLimits(verbose_errors=False)
"""What a grammar may grow to, while it is compiled and in each step: llguidance's own measures."""

Mask = NDArray[np.uint8]
"""[V / 8, rounded up] one bit for each token, the lowest of a byte first; those past the vocabulary are 0."""


def bits(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """A mask with the bit of each id set."""
    mask = np.zeros(-(-vocab_size // 8), np.uint8)
    for token_id in token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return mask


class GrammarFailed(RuntimeError):
    """The grammar grew too complex for llguidance's limits while the text was generated."""


class Matcher:
    """Where one text stands in its grammar. The engine alone moves it on, by tokens that it allowed."""

    def __init__(self, vocabulary: _Vocabulary, start: LLMatcher, end_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._start = start
        self._state = start.deep_copy()
        self._ends = bits(end_ids, vocabulary.size)

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can be added to it."""
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def complete(self) -> bool:
        """Whether the text follows the grammar as it stands, and so may end."""
        return self._state.is_accepting()

    def accept(self, token_id: int) -> None:
        """Move on by a token that is part of the text. Raises `GrammarFailed` if it isn't allowed here."""
        if not self._state.consume_token(token_id):
            raise GrammarFailed(f"the grammar can't be followed any further: {told(self._state.get_error())}")

    def parses(self, text: str) -> bool:
        """Whether a text, whole and from its beginning, follows the grammar."""
        tokens = self._vocabulary.tokenizer.greedy_tokenize(text)
        state = self._start.deep_copy()
        return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


class Grammars:
    """Compiled grammars of one tokenizer, the last used are kept. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        """Of what is compiled; never held for long."""
        self._compiling = threading.Lock()

    def knows(self, grammar: Grammar) -> bool:
        """Whether `matcher` needn't compile it."""
        with self._lock:
            return grammar in self._compiled

    def matcher(self, grammar: Grammar, end_ids: Sequence[int]) -> Matcher:
        """A matcher at the beginning of a text that `end_ids` may end. Raises `GrammarError`."""
        start = self._find(grammar)
        if start is None:
            with self._compiling:
                start = self._find(grammar) or self._compile(grammar)  # another thread may have been before
        assert self._vocabulary is not None
        return Matcher(self._vocabulary, start, end_ids)

    def _find(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar and keep it."""
        grammar.check()
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size)
        start = LLMatcher(self._vocabulary.tokenizer, grammar.form(), log_level=0, limits=LIMITS)
        if start.is_error():
            raise GrammarError(grammar.kind.value, told(start.get_error()))
        first = start.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise GrammarError(grammar.kind.value, told(first.get_error()))
        with self._lock:
            self._compiled[grammar] = start
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        return start


def masks(matchers: Sequence[Matcher | None]) -> list[Mask | None]:
    """The bits of the tokens that may come next, for each matcher of one engine's. Raises `GrammarFailed`."""
    wanted = [matcher for matcher in matchers if matcher is not None]
    if not wanted:
        return [None] * len(matchers)
    found = iter(wanted[0]._vocabulary.masks(wanted))
    return [None if matcher is None else next(found) for matcher in matchers]


class _Vocabulary:
    """The tokens as llguidance knows them: their bytes, and one of our own behind them that ends a text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.size = vocab_size
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, vocab_size)), n_vocab=vocab_size + 1)
        self._executor = LLExecutor()

    def masks(self, matchers: Sequence[Matcher]) -> list[Mask]:
        """The bits of the tokens that may come next, for each matcher; ends of text where the grammar has its end."""
        words = allocate_token_bitmask(len(matchers), self.size + 1)
        fill_next_token_bitmask_par(self._executor, [(m._state, row) for row, m in enumerate(matchers)], words)
        found = [self._with_ends(m, row) for m, row in zip(matchers, words.view(np.uint8), strict=True)]
        for matcher, mask in zip(matchers, found, strict=True):
            if not mask.any():
                raise GrammarFailed(f"no token follows the grammar from here: {told(matcher._state.get_error())}")
        return found

    def _with_ends(self, matcher: Matcher, row: Mask) -> Mask:
        end = self.size
        complete = row[end >> 3] >> (end & 7) & 1
        mask = row[: -(-end // 8)]
        if end & 7:
            mask[-1] &= (1 << (end & 7)) - 1
        if complete:
            return mask | matcher._ends
        rest = mask & ~matcher._ends
        return rest if rest.any() else mask  # the grammar is stronger than who asks to stop at all that it allows


class _Tokens:
    """What `TokenizerWrapper` asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.tokens = [*(tokenizer.pieces[token_id] for token_id in range(vocab_size)), b""]
        self.special_token_ids = [token_id for token_id, data in enumerate(self.tokens) if not data]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text, without special tokens: one that has a special token's name is text like any other."""
        return self._tokenizer.encode_literally(text.decode() if isinstance(text, bytes) else text)
