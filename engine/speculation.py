"""Tokens that are guessed ahead and checked by the step that would compute one: prompt lookup. No torch here.

What follows a place where the same tokens stood before often follows again: quotations, code, lists, and a small
model's repetitions. The step computes the guesses behind the last known token, as rows of one chunk, and chooses a
token after each of them. As long as what is chosen is what was guessed, the next choice holds as well; the first other
one ends it. So the output is what it would have been, several tokens at a time.

Sources: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), here with
choices that are functions of seed and position, so that no rejection has to be drawn; Saxena, "Prompt Lookup Decoding"
(2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.sequence import TokenSequence

NGRAM = 3
"""Tokens that have to stand there as before."""
REMEMBERED_TOKENS = 4096
"""Of a prompt, the last ones that are looked through."""
LEAST_TRUST_CHEAP = 0.3
"""Share of right guesses from which those pay that cost hardly anything: where reading the weights takes the time."""
LEAST_TRUST_DEAR = 0.8
"""And those whose rows cost nearly as much as others."""
TRUST_AT_FIRST = 0.5
NEWEST_WEIGHT = 0.3
"""Of the newest guess in a sequence's trust."""


class PromptLookup:
    """One sequence's places of each n-gram, and how often what followed them was right.

    A guess is judged whether it is computed or not: its first tokens come anyway.
    """

    def __init__(self) -> None:
        self.trust = TRUST_AT_FIRST
        self._latest: dict[tuple[int, ...], int] = {}
        """n-gram -> the place after it, where it stood last."""
        self._before: dict[int, int] = {}
        """The place after an n-gram -> the one where the same n-gram stood before that."""
        self._read = 0
        self._guess: list[int] = []

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; none that the two latest places disagree about."""
        self._index(tokens)
        known = len(tokens)
        place = self._latest.get(tuple(tokens[known - NGRAM :]))
        self._guess = []
        if place is not None:
            other = self._before.get(place, place)
            for _ in range(most):
                token = self._following(tokens, place)
                if self._following(tokens, other) != token:
                    break
                self._guess.append(token)
                place, other = place + 1, other + 1
        return self._guess

    def judge(self, came: Sequence[int]) -> None:
        """Learn from the tokens that came after the last guess was made."""
        guessed = self._guess[: len(came)]
        if guessed:
            right = sum(token == guess for token, guess in zip(came, guessed, strict=False))
            self.trust += NEWEST_WEIGHT * (right / len(guessed) - self.trust)
            self._guess = []

    def _following(self, tokens: Sequence[int], place: int) -> int:
        """The token at a place; behind the last known one stands what is guessed."""
        return tokens[place] if place < len(tokens) else self._guess[place - len(tokens)]

    def _index(self, tokens: Sequence[int]) -> None:
        """Note the n-grams that have a token after them."""
        latest, before = self._latest, self._before
        first = max(self._read, len(tokens) - REMEMBERED_TOKENS, NGRAM)
        for place in range(first, len(tokens)):
            ngram = tuple(tokens[place - NGRAM : place])
            known = latest.get(ngram)
            if known is not None:
                before[place] = known
            latest[ngram] = place
        self._read = max(self._read, len(tokens))


class Drafter(Protocol):
    """Another source of guesses: a draft model (`engine.drafting`)."""

    def propose(self, wanted: Sequence[tuple[TokenSequence, int]], rows: int) -> list[list[int]]:
        """Guesses of each sequence, at most so many; for a step that computes `rows` tokens without them."""
        ...


class Speculation:
    """Whose next tokens are guessed in a step, and how many of them."""

    def __init__(self, most: int, cheap_rows: int) -> None:
        """At most `most` for each; the model computes `cheap_rows` rows for little more than one, and 0 is never."""
        self._most = most if cheap_rows else 0
        self._cheap_rows = cheap_rows
        self._cheap_left = 0

    def __bool__(self) -> bool:
        return self._most > 0

    def begin(self, rows: int) -> None:
        """Begin with a step that has so many rows without any guess."""
        self._cheap_left = max(0, self._cheap_rows - rows)

    def most(self, sequence: TokenSequence, room: int) -> int:
        """How many tokens may be guessed for a sequence that has room for so many."""
        if sequence.coming or not sequence.guessable:
            return 0
        return max(0, min(self._most, room, sequence.max_len - len(sequence.tokens) - 1))

    def guess(self, sequence: TokenSequence, room: int) -> list[int]:
        """What to compute behind the last known token of a sequence: at most `room` tokens, often none."""
        most = self.most(sequence, room)
        if most < 1:
            return []
        if sequence.lookup is None:
            sequence.lookup = PromptLookup()
        guess = sequence.lookup.guess(sequence.tokens, most)
        if sequence.lookup.trust < LEAST_TRUST_DEAR:
            guess = guess[: self._cheap_left] if sequence.lookup.trust >= LEAST_TRUST_CHEAP else []
        self._cheap_left = max(0, self._cheap_left - len(guess))
        return guess
