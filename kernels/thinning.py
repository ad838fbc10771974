"""Which tokens of a long context each head keeps: the first, the last, and the most distinct keys between.

A key's score is minus the cosine of the angle between it and the mean of all keys at length 1: keys that are like
most others add little that these don't (Park et al., "KeyDiff: Key similarity-based KV cache eviction", 2025). It needs
no attention weights, and depends on nothing but the request's own keys. The first tokens stay because all others
lean on them (Xiao et al., "Efficient streaming language models with attention sinks", 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kernels.kv import KVLayout, Thinning


def chosen(keys: Tensor, work: Thinning) -> Tensor:
    """Keys [n, G, D] -> tokens [kept, G] that each head keeps, in ascending order."""
    units = normalize(keys.float(), dim=-1)
    scores = -(units * units.sum(0)).sum(-1)
    middle = scores[work.first : work.tokens - work.last]
    best = middle.sort(dim=0, descending=True, stable=True).indices[: work.kept - work.first - work.last]
    ends = torch.arange(work.tokens, device=keys.device)[:, None].expand(-1, keys.shape[1])
    return torch.cat([ends[: work.first], best.sort(dim=0).values + work.first, ends[work.tokens - work.last :]])


def pick(numbers: Tensor, tokens: Tensor) -> Tensor:
    """Of [n, G, ...] the tokens [kept, G] of each head, [kept, G, ...]."""
    index = tokens.view(*tokens.shape, *(1,) * (numbers.ndim - 2))
    return numbers.take_along_dim(index.expand(*tokens.shape, *numbers.shape[2:]), 0)


def slots_of(work: Thinning, layout: KVLayout, device: torch.device) -> Tensor:
    """[n] page * page_size + offset of each token of the context, int64."""
    tokens = torch.arange(work.tokens, device=device)
    pages = torch.tensor(list(work.pages), device=device)
    return pages[tokens // layout.page_size] * layout.page_size + tokens % layout.page_size
