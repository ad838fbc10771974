"""Choosing tokens in plain torch, without sorting the vocabulary.

A sampled row inverts the cumulative distribution over a fixed order of its tokens: the likeliest
first, equal ones by id. The head of that order (`HEAD_TOKENS`) settles nearly every row. A cut that
falls behind it takes a sort of that one row; a draw without any cut that falls behind it continues
over the other tokens by id. What happens to a row depends on that row alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.columns import INFINITE_KEY, Columns
from kernels.sampling import GREEDY_TEMPERATURE, NO_TOKEN, Adjustment, Sampled, SamplingBatch, TokenLogprobs, uniform

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


def sample(logits: Tensor, batch: SamplingBatch) -> Sampled:
    """Choose a token for each row of logits [S, V] float32; adjustments and bans are written into `logits`."""
    counts = batch.logprobs or ()
    reporting = [row for row, count in enumerate(counts) if count >= 0]
    raw = logits[reporting] if reporting else None
    adjust(logits, batch)
    tokens: list[int] = _likeliest_tokens(logits).tolist()
    rows = [row for row, token in enumerate(tokens) if token != NO_TOKEN and not batch.is_greedy(row)]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        for row, token in zip(rows, _draw(logits[index], _cuts(batch, rows, logits)).tolist(), strict=True):
            tokens[row] = token
    if batch.forced is not None:
        tokens = [token if forced < 0 else forced for token, forced in zip(tokens, batch.forced, strict=True)]
    return report(raw, reporting, tokens, batch)


def choose(logits: Tensor, columns: Columns) -> Tensor:
    """[S] int32: what each row of logits [S, V] float32 chooses by the columns; draws are scaled in place."""
    chosen = _likeliest_tokens(logits).to(torch.int32)
    rows = ((columns.temperature >= GREEDY_TEMPERATURE) & (chosen != NO_TOKEN)).nonzero().flatten()
    if len(rows):
        seeds, positions = columns.seed[rows].tolist(), columns.position[rows].tolist()
        drawn = [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
        kept = (columns.limit[rows] - 1).view(torch.float32).double()
        cuts = Cuts(
            temperature=columns.temperature[rows][:, None],
            top_k=columns.top_k[rows].long()[:, None],
            top_p=columns.top_p[rows][:, None],
            log_min_p=kept.neg().masked_fill(columns.limit[rows] >= INFINITE_KEY, float("-inf"))[:, None],
            uniform=torch.tensor(drawn, dtype=torch.float64, device=logits.device)[:, None],
        )
        chosen[rows] = _draw(logits[rows], cuts).to(torch.int32)
    return chosen


def _likeliest_tokens(logits: Tensor) -> Tensor:
    """[S] int64: the lowest id of the greatest logit of each row [S, V], `NO_TOKEN` if that is no finite number."""
    ids = logits.argmax(dim=-1, keepdim=True)
    return ids.masked_fill_(~logits.gather(1, ids).isfinite(), NO_TOKEN).squeeze(1)


def report(raw: Tensor | None, reporting: list[int], tokens: list[int], batch: SamplingBatch) -> Sampled:
    """The chosen tokens [S], and what rows `reporting` report of their logits as they came, `raw`; None if none do.

    A row without a token reports NaN.
    """
    if raw is None or batch.logprobs is None:
        return Sampled(tokens)
    counts = batch.logprobs
    logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
    found = _report(raw, [max(tokens[row], 0) for row in reporting], [counts[row] for row in reporting])
    for row, each in zip(reporting, found, strict=True):
        logprobs[row] = each if tokens[row] != NO_TOKEN else TokenLogprobs(NO_TOKEN, math.nan, 0, ())
    return Sampled(tokens, logprobs)


def adjust(logits: Tensor, batch: SamplingBatch) -> None:
    """Write what changes the rows' logits, and their bans, into `logits`."""
    for row, adjustment in enumerate(batch.adjust or ()):
        if adjustment is not None:
            _adjust_row(logits[row], adjustment)
    for row, banned in enumerate(batch.banned):
        if banned:
            logits[row, list(banned)] = float("-inf")


def _adjust_row(logits: Tensor, adjustment: Adjustment) -> None:
    """Apply an adjustment to the logits [V] of one row, in float32."""
    device = logits.device
    tokens = torch.tensor(adjustment.tokens, dtype=torch.int64, device=device)
    if adjustment.repetition != 1:
        factor = torch.tensor(adjustment.repetition, dtype=torch.float32, device=device)
        penalised = torch.where(logits > 0, logits / factor, logits * factor)
        logits.copy_(torch.where(tokens.bincount(minlength=len(logits)) > 0, penalised, logits))
    if adjustment.frequency or adjustment.presence:
        times = tokens[adjustment.prompt_tokens :].bincount(minlength=len(logits))
        logits -= times.float() * adjustment.frequency + (times > 0).float() * adjustment.presence
    if adjustment.bias:
        ids, additions = zip(*adjustment.bias, strict=True)
        logits[list(ids)] += torch.tensor(additions, dtype=torch.float32, device=device)
    if adjustment.allowed is not None:
        logits.masked_fill_(~_bits(adjustment.allowed, len(logits), device), float("-inf"))


def _bits(packed: bytes, count: int, device: torch.device) -> Tensor:
    """[count] bool, the lowest bit of a byte first."""
    data = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return ((data[:, None] >> places) & 1).bool().flatten()[:count]


def _report(raw: Tensor, chosen: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Log-softmax of the chosen token, its rank and the `counts` likeliest of each row of raw logits [r, V]."""
    ids = torch.tensor(chosen, device=raw.device)[:, None]
    greatest = raw.amax(dim=-1, keepdim=True)
    total = (raw - greatest).exp().sum(dim=-1, keepdim=True, dtype=torch.float64).log()
    own = raw.gather(1, ids)
    place = torch.arange(raw.shape[1], device=raw.device)
    rank = ((raw > own) | ((raw == own) & (place < ids))).sum(dim=-1) + 1
    likeliest = _likeliest(raw, min(max(counts), raw.shape[1]))
    top = ((raw.gather(1, likeliest) - greatest).double() - total).tolist()
    logprobs = ((own - greatest).double() - total).flatten().tolist()
    return [
        TokenLogprobs(token, logprob, at, tuple(zip(others[:count], values[:count], strict=True)))
        for token, logprob, at, others, values, count in zip(
            chosen, logprobs, rank.tolist(), likeliest.tolist(), top, counts, strict=True
        )
    ]


def _likeliest(raw: Tensor, count: int) -> Tensor:
    """[r, count] ids of the greatest logits of each row [r, V] in descending order, equal ones by id."""
    values, ids = raw.topk(count, dim=-1)
    ids = ids.sort(dim=-1).values
    ids = ids.gather(1, raw.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)
    if count:
        last = values[:, -1:]
        for row in ((raw >= last).sum(dim=-1) > count).nonzero().flatten().tolist():
            ids[row] = raw[row].sort(descending=True, stable=True).indices[:count]
    return ids


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
