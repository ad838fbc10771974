"""The rows of a step whose logits are wanted, and how a token comes from each. No torch here."""

from __future__ import annotations

from typing import NamedTuple

from engine.grammar import masks
from engine.scheduler import Chunk
from engine.sequence import GREEDY, TokenSequence
from kernels.sampling import Adjustment, SamplingBatch


class Row(NamedTuple):
    """One row of logits of a sequence."""

    sequence: TokenSequence
    position: int
    """Of the token that it gives."""
    forced: int
    """The token of the prompt that it scores, -1 if one is sampled."""


class Rows:
    """S rows of a step; those of a chunk stand together, in the order of their positions."""

    def __init__(self) -> None:
        self.flat: list[int] = []
        """[S] where each stands in the flat batch."""
        self._rows: list[Row] = []

    def add(self, chunk: Chunk, first: int) -> None:
        """The rows of a chunk that begins at row `first` of the flat batch."""
        sequence, start, end = chunk
        if sequence.prompt_logprobs >= 0:
            for position in sequence.unscored(start, end):
                self.flat.append(first + position - 1 - start)
                self._rows.append(Row(sequence, position, sequence.tokens[position]))
        if chunk.samples:
            self.flat.append(first + end - 1 - start)
            self._rows.append(Row(sequence, end, -1))

    def sampling(self) -> SamplingBatch:
        """Parameters of all rows, in columns. Raises `GrammarFailed` if a grammar leaves no token."""
        rows = self._rows
        if not rows:
            return SamplingBatch((), (), (), (), (), (), ())
        how = [row.sequence.sampling if row.forced < 0 else GREEDY for row in rows]
        temperature, top_k, top_p, min_p, seed = zip(*how, strict=True)
        scores = max(row.forced for row in rows) >= 0
        counts = [row.sequence.logprobs if row.forced < 0 else row.sequence.prompt_logprobs for row in rows]
        adjust, banned = self._rules()
        return SamplingBatch(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=tuple([row.position for row in rows]),
            banned=banned,
            adjust=adjust,
            forced=tuple([row.forced for row in rows]) if scores else None,
            logprobs=tuple(counts) if max(counts) >= 0 else None,
        )

    def _rules(self) -> tuple[tuple[Adjustment | None, ...] | None, tuple[tuple[int, ...], ...]]:
        """[S] adjustments, or None if no row has any, and [S] bans."""
        rows = self._rows
        banned = [row.sequence.banned if row.forced < 0 else () for row in rows]
        rules = [row.sequence.rules if row.forced < 0 else None for row in rows]
        if not any(rules):
            return None, tuple(banned)
        adjust: list[Adjustment | None] = [None] * len(rows)
        allowed = masks([None if rule is None else rule.matcher for rule in rules])
        for i, (row, rule) in enumerate(zip(rows, rules, strict=True)):
            if rule is not None:
                sequence = row.sequence
                adjust[i], banned[i] = rule.apply(sequence.tokens, sequence.prompt_tokens, banned[i], allowed[i])
        return tuple(adjust), tuple(banned)
