"""The rows of a step whose logits are wanted, and how a token comes from each. No torch here."""

from __future__ import annotations

from engine.grammar import masks
from engine.scheduler import Chunk
from engine.sequence import GREEDY, TokenSequence
from kernels.sampling import Adjustment, SamplingBatch


class Rows:
    """S rows of a step; those of a chunk stand together, in the order of their positions.

    Most rows of most steps are sampled and have no rules: for them this is a few lists.
    """

    def __init__(self) -> None:
        self.flat: list[int] = []
        """[S] where each stands in the flat batch."""
        self._sequences: list[TokenSequence] = []
        self._positions: list[int] = []
        self._forced: list[int] = []
        """[S] the token of the prompt that a row scores, -1 if one is sampled."""
        self._scores = False

    def add(self, chunk: Chunk, first: int) -> None:
        """The rows of a chunk that begins at row `first` of the flat batch."""
        sequence, start, end = chunk
        if sequence.prompt_logprobs >= 0:
            for position in sequence.unscored(start, end):
                self._scores = True
                self._append(first + position - 1 - start, sequence, position, sequence.tokens[position])
        known = len(sequence.tokens) + sequence.coming
        if end >= known < sequence.max_len:
            for position in range(known, end + 1):
                self._append(first + position - 1 - start, sequence, position, -1)

    def _append(self, flat: int, sequence: TokenSequence, position: int, forced: int) -> None:
        self.flat.append(flat)
        self._sequences.append(sequence)
        self._positions.append(position)
        self._forced.append(forced)

    def sampling(self) -> SamplingBatch:
        """Parameters of all rows, in columns. Raises `GrammarFailed` if a grammar leaves no token."""
        sequences = self._sequences
        if not sequences:
            return SamplingBatch((), (), (), (), (), (), ())
        how = [sequence.sampling for sequence in sequences]
        counts = [sequence.logprobs for sequence in sequences]
        banned = [sequence.banned for sequence in sequences]
        if self._scores:
            for row, (sequence, forced) in enumerate(zip(sequences, self._forced, strict=True)):
                if forced >= 0:
                    how[row], counts[row], banned[row] = GREEDY, sequence.prompt_logprobs, ()
        temperature, top_k, top_p, min_p, seed = zip(*how, strict=True)
        adjust = self._apply_rules(banned)
        return SamplingBatch(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=tuple(self._positions),
            banned=tuple(banned),
            adjust=adjust,
            forced=tuple(self._forced) if self._scores else None,
            logprobs=tuple(counts) if max(counts) >= 0 else None,
        )

    def _apply_rules(self, banned: list[tuple[int, ...]]) -> tuple[Adjustment | None, ...] | None:
        """[S] adjustments, or None if no row has any; what may not come is added to `banned` [S]."""
        rules = [sequence.rules for sequence in self._sequences]
        if not any(rules):
            return None
        if self._scores:
            rules = [rule if forced < 0 else None for rule, forced in zip(rules, self._forced, strict=True)]
        adjust: list[Adjustment | None] = [None] * len(rules)
        allowed = masks([None if rule is None else rule.matcher for rule in rules])
        for row, (sequence, rule) in enumerate(zip(self._sequences, rules, strict=True)):
            if rule is not None:
                tokens, prompt = sequence.tokens, sequence.prompt_tokens
                adjust[row], banned[row] = rule.apply(tokens, prompt, banned[row], allowed[row])
        return tuple(adjust)
