"""How the fake model takes a token from a row: `kernels.sampling` by its definitions, greedily, in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from kernels.sampling import Adjustment, SamplingBatch, TokenLogprobs


def take(wanted: Sequence[int], vocab_size: int, sampling: SamplingBatch, row: int) -> tuple[int, TokenLogprobs | None]:
    """The token of one row, whose likeliest tokens are `wanted`, and what it reports."""
    forced = sampling.forced[row] if sampling.forced is not None else -1
    adjustment = sampling.adjust[row] if sampling.adjust is not None else None
    count = sampling.logprobs[row] if sampling.logprobs is not None else -1
    banned = sampling.banned[row]
    if forced < 0 and adjustment is None and count < 0:
        return next(token for token in (*wanted, *range(vocab_size)) if token not in banned), None
    logits = fake_logits(wanted, vocab_size)
    token = forced if forced >= 0 else _greatest(adjusted(logits, adjustment or Adjustment()), banned)
    return token, _report(logits, token, count) if count >= 0 else None


def fake_logits(wanted: Sequence[int], vocab_size: int) -> list[float]:
    """[V]: 8 for the last of the wanted tokens, one more for each before it; the others fall with their ids."""
    logits = [-token / 256 for token in range(vocab_size)]
    for i, token in enumerate(reversed(wanted)):
        logits[token] = 8.0 + i
    return logits


def adjusted(logits: Sequence[float], adjustment: Adjustment) -> list[float]:
    """What an adjustment makes of logits [V]."""
    changed = list(logits)
    for token in set(adjustment.tokens):
        penalty = adjustment.repetition
        changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
    for token, times in Counter(adjustment.tokens[adjustment.prompt_tokens :]).items():
        changed[token] -= adjustment.frequency * times + adjustment.presence
    for token, addition in adjustment.bias:
        changed[token] += addition
    allowed = adjustment.allowed
    if allowed is not None:
        changed = [
            logit if allowed[token >> 3] >> (token & 7) & 1 else -math.inf for token, logit in enumerate(changed)
        ]
    return changed


def _greatest(logits: list[float], banned: Sequence[int]) -> int:
    for token in banned:
        logits[token] = -math.inf
    best = max(logits)
    assert best > -math.inf, "a row has no token left"
    return logits.index(best)


def _report(logits: Sequence[float], token: int, count: int) -> TokenLogprobs:
    total = math.log(sum(map(math.exp, logits)))
    order = sorted(range(len(logits)), key=lambda other: (-logits[other], other))
    top = tuple((other, logits[other] - total) for other in order[:count])
    return TokenLogprobs(token, logits[token] - total, order.index(token) + 1, top)
