"""Choosing tokens in plain torch, without sorting the vocabulary.

A sampled row inverts the cumulative distribution over a fixed order of its tokens: the likeliest
first, equal ones by id. The head of that order (`HEAD_TOKENS`) settles nearly every row. A cut that
falls behind it takes a sort of that one row; a draw without any cut that falls behind it continues
over the other tokens by id. What happens to a row depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import SamplingBatch, uniform

HEAD_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Cuts:
    """Parameters of s sampled rows, one column each: [s, 1] float64, `top_k` int64."""

    temperature: Tensor
    top_k: Tensor
    """The vocabulary's size if there is no such cut."""
    top_p: Tensor
    log_min_p: Tensor
    uniform: Tensor

    def row(self, i: int) -> Cuts:
        return Cuts(*(getattr(self, name)[i : i + 1] for name in self.__slots__))

    def open(self, vocab: int) -> Tensor:
        """[s] whether the row may draw any token."""
        return ((self.top_k >= vocab) & (self.top_p >= 1) & self.log_min_p.isneginf()).squeeze(1)


@dataclass(frozen=True, slots=True)
class Head:
    """The first K tokens of each row's order."""

    ids: Tensor
    """[s, K]"""
    logits: Tensor
    """[s, K] float64, scaled; the greatest is 0."""
    mass: Tensor
    """[s, K] float64, cumulative weight exp(logit)."""
    known: Tensor
    """[s, 1] how many of them are certain: those behind may tie with tokens outside."""


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Choose a token for each row of logits [S, V] float32 -> [S] int64; bans are written into `logits`."""
    for row, banned in enumerate(batch.banned):
        if banned:
            logits[row, list(banned)] = float("-inf")
    chosen = logits.argmax(dim=-1)
    rows = [row for row in range(len(batch.temperature)) if not batch.is_greedy(row)]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        chosen[index] = _draw(logits[index], _cuts(batch, rows, logits))
    return chosen


def _cuts(batch: SamplingBatch, rows: list[int], logits: Tensor) -> Cuts:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    vocab = logits.shape[1]
    top_k = [batch.top_k[r] if 0 < batch.top_k[r] < vocab else vocab for r in rows]
    return Cuts(
        temperature=column([batch.temperature[r] for r in rows]),
        top_k=torch.tensor(top_k, device=logits.device)[:, None],
        top_p=column([batch.top_p[r] for r in rows]),
        log_min_p=column([batch.min_p[r] for r in rows]).log(),
        uniform=column([uniform(batch.seed[r], batch.position[r]) for r in rows]),
    )


def _draw(logits: Tensor, cuts: Cuts) -> Tensor:
    """Draw a token for each row of logits [s, V]."""
    vocab = logits.shape[1]
    scaled = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(cuts.temperature.float())
    total = scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    head = _head(scaled, min(HEAD_TOKENS, vocab))
    chosen, settled = _settle(head, total, cuts, vocab)
    for i in (~settled).nonzero().flatten().tolist():
        row = scaled[i : i + 1]
        if bool(cuts.open(vocab)[i]):
            chosen[i] = _draw_behind(row[0], head.ids[i, : int(head.known[i])], total[i], cuts.uniform[i])
        else:
            chosen[i] = _settle(_head(row, vocab), total[i : i + 1], cuts.row(i), vocab)[0][0]
    return chosen


def _head(scaled: Tensor, tokens: int) -> Head:
    """The first `tokens` of the order of each row of scaled logits [s, V]."""
    vocab = scaled.shape[1]
    if tokens == vocab:
        logits, ids = scaled.sort(dim=-1, descending=True, stable=True)
        known = torch.full((len(scaled), 1), vocab, device=scaled.device)
    else:
        ids = scaled.topk(tokens, dim=-1, sorted=False).indices.sort(dim=-1).values
        logits, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
        known = (logits > logits[:, -1:]).sum(dim=-1, keepdim=True)
    logits = logits.double()
    return Head(ids=ids, logits=logits, mass=logits.exp().cumsum(dim=-1), known=known)


def _settle(head: Head, total: Tensor, cuts: Cuts, vocab: int) -> tuple[Tensor, Tensor]:
    """[s] the drawn token of each row, and [s] whether the head sufficed to know it."""
    place = torch.arange(head.ids.shape[1], device=head.ids.device)
    survives = (place < torch.minimum(head.known, cuts.top_k)) & (head.logits >= cuts.log_min_p)
    kept = (survives & ~head.logits.isneginf()).sum(dim=-1, keepdim=True)
    ends_inside = (kept < head.known) | (cuts.top_k <= head.known)
    mass = torch.where(ends_inside, _mass_of(head, kept), total)

    has_nucleus = cuts.top_p < 1
    nucleus = ((head.mass < cuts.top_p * mass) & (place < kept)).sum(dim=-1, keepdim=True) + 1
    last = torch.where(has_nucleus, torch.minimum(nucleus, kept), kept)
    mass = torch.where(has_nucleus, _mass_of(head, last), mass)

    pick = ((head.mass <= cuts.uniform * mass) & (place < head.known)).sum(dim=-1, keepdim=True)
    only_nucleus = (cuts.top_k >= vocab) & cuts.log_min_p.isneginf()
    in_nucleus = has_nucleus & (nucleus <= kept) & (ends_inside | only_nucleus)
    bounded = in_nucleus | (ends_inside & ~has_nucleus)
    settled = bounded | (cuts.open(vocab)[:, None] & (pick < head.known))
    pick = torch.where(bounded, torch.minimum(pick, last - 1), pick).clamp_(0, head.ids.shape[1] - 1)
    return head.ids.gather(1, pick).squeeze(1), settled.squeeze(1)


def _mass_of(head: Head, tokens: Tensor) -> Tensor:
    """[s, 1] weight of the first `tokens` [s, 1] of each row."""
    return head.mass.gather(1, (tokens - 1).clamp(min=0))


def _draw_behind(scaled: Tensor, head: Tensor, total: Tensor, point: Tensor) -> Tensor:
    """Draw from the tokens of one row [V] outside its head, which the draw has passed, in the order of their ids."""
    weight = scaled.double().exp()
    passed = weight[head].sum()
    mass = weight.index_fill_(0, head, 0).cumsum(0)
    place = torch.searchsorted(mass, (point * total - passed).clamp_(min=0), right=True)
    return torch.where(place < len(mass), place, torch.searchsorted(mass, mass[-1]))
