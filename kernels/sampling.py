"""Sampling parameters of one step, in plain Python: no torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the S rows of a step. Plain sequences: most rows of most steps are greedy."""

    temperature: tuple[float, ...]
    """0 for greedy rows."""
    top_k: tuple[int, ...]
    """0 keeps all."""
    top_p: tuple[float, ...]
    min_p: tuple[float, ...]
    seed: tuple[int, ...]
    position: tuple[int, ...]
    """Position in the sequence of the token to be chosen."""
    banned: tuple[tuple[int, ...], ...]
    """Token ids masked to -inf in each row: ends of text before `min_tokens`.

    Ids past the vocabulary are not listed: the model cuts its logits to `ModelInfo.vocab_size`.
    """
