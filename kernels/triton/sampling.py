"""Choosing tokens on a GPU: the parameters of a step become columns, one launch chooses for all rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.columns import Columns
from kernels.reference_sampling import HEAD_TOKENS, adjust, report
from kernels.sampling import Sampled, SamplingBatch
from kernels.triton.device.sampling import sample_kernel

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
    return choose_by(logits, Columns.on(logits.device, batch, logits.shape[1]))


def choose_by(logits: Tensor, columns: Columns) -> Tensor:
    """As `kernels.protocol.Kernels.choose`."""
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        sample_kernel[(rows,)](
            logits, chosen, columns.temperature, columns.limit, columns.top_k, columns.top_p, columns.seed,
            columns.position, vocab, logits.stride(0),
            HEAD=HEAD_TOKENS, BLOCK=BLOCK, num_warps=WARPS, num_stages=3,
        )  # fmt: skip
    return chosen
