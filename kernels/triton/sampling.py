"""Choosing tokens on a GPU: the parameters of a step become columns, one launch chooses for all rows."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from kernels.reference_sampling import HEAD_TOKENS, adjust, report
from kernels.sampling import Sampled, SamplingBatch
from kernels.triton.device.sampling import sample_kernel

INFINITE_KEY = 0x7F800000
BLOCK = 2048
WARPS = 8


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """As `kernels.protocol.Kernels.sample`; adjustments and bans are written into `logits`."""
    counts = batch.logprobs or ()
    reporting = [row for row, count in enumerate(counts) if count >= 0]
    raw = logits[reporting] if reporting else None
    adjust(logits, batch)
    tokens: list[int] = choose(logits, batch).tolist()
    if batch.forced is not None:
        tokens = [token if forced < 0 else forced for token, forced in zip(tokens, batch.forced, strict=True)]
    return report(raw, reporting, tokens, batch)


def choose(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[S] int32 on the device: what each row of logits [S, V] float32 chooses."""
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return chosen
    integers, numbers = columns(batch, vocab)
    limit, top_k, position = integers.to(logits.device, non_blocking=True).unbind()
    top_p, temperature = numbers.to(logits.device, non_blocking=True).unbind()
    seed = torch.tensor([_signed(seed) for seed in batch.seed], dtype=torch.int64).to(logits.device, non_blocking=True)
    sample_kernel[(rows,)](
        logits, chosen, temperature, limit, top_k, top_p, seed, position, vocab, logits.stride(0),
        HEAD=HEAD_TOKENS, BLOCK=BLOCK, num_warps=WARPS, num_stages=3,
    )  # fmt: skip
    return chosen


def columns(batch: SamplingBatch, vocab: int) -> tuple[Tensor, Tensor]:
    """(limit, top_k, position) [3, S] int32 and (top_p, temperature) [2, S] float64."""
    rows = range(len(batch.temperature))
    greedy = [batch.is_greedy(row) for row in rows]
    integers = [
        [limit_key(batch.min_p[row]) for row in rows],
        [batch.top_k[row] if 0 < batch.top_k[row] < vocab else vocab for row in rows],
        list(batch.position),
    ]
    numbers = [list(batch.top_p), [0.0 if greedy[row] else batch.temperature[row] for row in rows]]
    return torch.tensor(integers, dtype=torch.int32), torch.tensor(numbers, dtype=torch.float64)


def limit_key(min_p: float) -> int:
    """The first key that `min_p` cuts off: the bits of the greatest float32 distance that it keeps, and one more."""
    if min_p <= 0:
        return INFINITE_KEY
    distance = -math.log(min_p)
    nearest = np.float32(distance)
    kept = np.nextafter(nearest, np.float32(0)) if float(nearest) > distance else nearest
    return int(struct.unpack("<i", struct.pack("<f", kept))[0]) + 1


def _signed(seed: int) -> int:
    """The low 64 bits of a seed as torch holds them."""
    low = seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
