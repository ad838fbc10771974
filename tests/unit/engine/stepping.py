"""Models stepped by hand, as a scheduler would."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.batch import Batch, Model
from kernels.sampling import SamplingBatch, TokenLogprobs

PAGES = 200
PAGE_SIZE = 16


def allocate(model: Model) -> None:
    layout = model.kv_layout(PAGE_SIZE)
    units = layout.units_for(PAGES)
    model.allocate_kv(layout, units, units)


@dataclass
class Run:
    """One request as a scheduler would see it."""

    tokens: list[int]
    temperature: float = 0.0
    seed: int = 0
    adapter: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)


def step(model: Model, work: list[tuple[Run, int]], free: list[int]) -> None:
    """Compute the next n tokens of each run; runs that reach their end get a token."""
    token_ids, positions, slots, starts, ends = [], [], [], [0], []
    for run, n in work:
        end = run.computed + n
        while len(run.pages) * PAGE_SIZE < end:
            run.pages.append(free.pop())
        token_ids += run.tokens[run.computed : end]
        positions += range(run.computed, end)
        slots += [run.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(run.computed, end)]
        starts.append(len(token_ids))
        ends.append(end)
    sampled = [i for i, (run, _) in enumerate(work) if ends[i] == len(run.tokens)]
    runs = [work[i][0] for i in sampled]
    ones = (1.0,) * len(runs)
    batch = Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_start=starts,
        context_len=ends,
        block_tables=[run.pages for run, _ in work],
        sample_rows=[starts[i + 1] - 1 for i in sampled],
        sampling=SamplingBatch(
            temperature=tuple(run.temperature for run in runs),
            top_k=(0,) * len(runs),
            top_p=ones,
            min_p=(0.0,) * len(runs),
            seed=tuple(run.seed for run in runs),
            position=tuple(len(run.tokens) for run in runs),
            banned=((),) * len(runs),
        ),
        adapters=[run.adapter for run, _ in work] if any(run.adapter for run, _ in work) else [],
    )
    chosen = model.execute(batch).tokens
    assert len(chosen) == len(runs)
    for (run, n), end in zip(work, ends, strict=True):
        run.computed = end
        assert n > 0
    for run, token in zip(runs, chosen, strict=True):
        run.tokens.append(token)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (1, 3, 4, 5, 17, 40)]


def finish(model: Model, runs: list[Run], new_tokens: int, chunk: int) -> list[list[int]]:
    """All runs side by side, prompts in chunks; the outputs."""
    free = list(range(PAGES))
    lengths = [len(run.tokens) for run in runs]
    while work := [
        (run, min(chunk, len(run.tokens) - run.computed))
        for run, length in zip(runs, lengths, strict=True)
        if len(run.tokens) < length + new_tokens
    ]:
        step(model, work, free)
    return [run.tokens[length:] for run, length in zip(runs, lengths, strict=True)]


def score(model: Model, tokens: list[int], chunk: int, top: int = 5) -> list[TokenLogprobs]:
    """The logprobs of every token but the first, computed in chunks of one request."""
    pages = list(range(-(-len(tokens) // PAGE_SIZE)))
    reports: list[TokenLogprobs] = []
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        rows = range(min(end, len(tokens) - 1) - start)
        ones, zeros = (1.0,) * len(rows), (0,) * len(rows)
        batch = Batch(
            token_ids=tokens[start:end],
            positions=list(range(start, end)),
            slots=list(range(start, end)),
            query_start=[0, end - start],
            context_len=[end],
            block_tables=[pages],
            sample_rows=list(rows),
            sampling=SamplingBatch(
                temperature=(0.0,) * len(rows),
                top_k=zeros,
                top_p=ones,
                min_p=(0.0,) * len(rows),
                seed=zeros,
                position=tuple(start + row + 1 for row in rows),
                banned=((),) * len(rows),
                forced=tuple(tokens[start + row + 1] for row in rows),
                logprobs=(top,) * len(rows),
            ),
        )
        sampled = model.execute(batch)
        assert sampled.tokens == [tokens[start + row + 1] for row in rows]
        reports += [report for report in sampled.logprobs or [] if report is not None]
    assert len(reports) == len(tokens) - 1
    return reports
