"""Random workloads: whatever the scheduler does with them, each request's tokens are those that it would have alone.

Prompts and outputs end around the boundaries of pages (4 tokens) and of the context (64); chunks have the
sizes that are known to go wrong; pools are so small that requests make way several times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.fake import FakeModel, fake_token
from engine.request import FinishReason
from kernels.sampling import Sampled, uniform
from tests.unit.engine.bench import Bench, Clock, make_bench

CONTEXT = 64
PAGES = CONTEXT // 4
PAGE_BYTES = 2**18
"""16 in an extent."""
SHARED = "this is what many requests have in common, and more of it than is asked"
LENGTHS = st.one_of(st.sampled_from([1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 60, 62, 63]), st.integers(1, 63))


class SeededModel(FakeModel):
    """The next token depends on the last one, its position and the row's seed. A pool is a few extents."""

    def __init__(self, reach_tokens: int | None = None) -> None:
        super().__init__(kv_bytes_per_token=PAGE_BYTES // 4, cheap_rows=4, reach_tokens=reach_tokens)

    def execute(self, batch: Batch) -> Sampled:
        super().execute(batch)  # checks that the context of each request is its own
        sampling = batch.sampling
        rows = zip(batch.sample_rows, sampling.seed, sampling.position, strict=True)
        return Sampled([seeded_token(batch.token_ids[at], seed, position) for at, seed, position in rows])


def seeded_token(last: int, seed: int, position: int) -> int:
    """By an odd seed mostly the same round of a few letters, so that guesses often come true."""
    drawn = uniform(seed, position)
    if seed % 2:
        return ord("a") + (last + 1 + (drawn < 0.15)) % 5
    return fake_token(last + int(1000 * drawn), position)


@dataclass(frozen=True)
class Asked:
    """One request of a workload."""

    shared: int
    tail: str
    output: int
    seed: int
    priority: int
    tenant: str
    gap: int
    """Steps before the next one arrives."""
    ends: str
    """`itself`, `abort` after `gap` steps, or `deadline`."""

    @property
    def prompt(self) -> str:
        return ((SHARED[: self.shared] + self.tail) or "x")[: CONTEXT - 1]

    @property
    def tokens(self) -> tuple[int, ...]:
        """What it gets if nothing ends it early."""
        tokens = list(self.prompt.encode())
        count = min(self.output, CONTEXT - len(tokens))
        for _ in range(count):
            tokens.append(seeded_token(tokens[-1], self.seed, len(tokens)))
        return tuple(tokens[len(tokens) - count :])


REQUEST = st.builds(
    Asked,
    shared=st.one_of(st.just(0), LENGTHS),
    tail=st.sampled_from(["", "a", "bc", "def", "tail of it"]),
    output=LENGTHS,
    seed=st.integers(0, 5),
    priority=st.integers(0, 2),
    tenant=st.sampled_from(["one", "two"]),
    gap=st.integers(0, 6),
    ends=st.sampled_from(["itself"] * 6 + ["abort", "deadline"]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([1, 7, 16, 17, 10_000]),
        "max_num_seqs": st.sampled_from([1, 2, 4, 8]),
        "prefill_share": st.sampled_from([0.05, 0.25, 1.0]),
        "swap_space_bytes": st.sampled_from([0, 6 * PAGE_BYTES, 200 * PAGE_BYTES]),
        "enable_prefix_caching": st.booleans(),
        "batch_window_ms": st.sampled_from([0.0, 3000.0]),
        "num_speculative_tokens": st.sampled_from([0, 1, 4]),
        "aging_s": st.sampled_from([2.0, 60.0]),
    }
)
REACHES = st.sampled_from([None, None, 1, 4, 5, 9, 30, 64])
"""Tokens that a token sees: pages behind that are given back."""
Workload = tuple[list[Asked], dict[str, Any], int, int | None]
WORKLOAD = st.tuples(
    st.lists(REQUEST, min_size=1, max_size=10), SETTINGS, st.sampled_from([PAGES + 1, 24, 40, 200]), REACHES
)


def carry_out(requests: list[Asked], config: dict[str, Any], pages: int, reach_tokens: int | None) -> Bench:
    """Run a workload to its end, with one second for each step; every invariant is checked after every step."""
    clock = Clock()
    bench = make_bench(SeededModel(reach_tokens), pages, clock, max_seq_len=CONTEXT, **config)
    aborts: dict[str, int] = {}

    def step() -> None:
        bench.step()
        clock.now_s += 1.0
        for name in [name for name, left in aborts.items() if left == 0]:
            del aborts[name]
            bench.engine.abort(name)
            bench.engine.check()
        for name in aborts:
            aborts[name] -= 1

    for number, asked in enumerate(requests):
        bench.add(
            str(number),
            asked.prompt,
            priority=asked.priority,
            tenant=asked.tenant,
            deadline_s=clock.now_s + 8.5 if asked.ends == "deadline" else None,
            max_tokens=asked.output,
            seed=asked.seed,
            temperature=1.0,
        )
        if asked.ends == "abort":
            aborts[str(number)] = asked.gap
        for _ in range(asked.gap):
            step()
    while bench.engine.has_work:
        step()
    bench.run()
    return bench


def verify(workload: Workload) -> None:
    requests = workload[0]
    bench = carry_out(*workload)
    assert len(bench.outputs) == len(requests)
    for number, asked in enumerate(requests):
        output = bench.outputs[str(number)]
        if output.finish_reason is FinishReason.ABORT:
            assert asked.ends != "itself"
            assert output.token_ids == asked.tokens[: len(output.token_ids)]
        else:
            assert (output.finish_reason, output.token_ids) == (FinishReason.LENGTH, asked.tokens)


@settings(max_examples=120, deadline=None)
@given(workload=WORKLOAD)
def test_every_request_gets_its_tokens(workload: Workload) -> None:
    """https://github.com/vllm-project/vllm/issues/16832, https://github.com/vllm-project/vllm/issues/5952,
    https://github.com/vllm-project/vllm/issues/5543, https://github.com/LMCache/LMCache/issues/3688"""
    verify(workload)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1500, deadline=None)
@given(workload=WORKLOAD)
def test_every_request_of_many_workloads_gets_its_tokens(
    workload: Workload,
) -> None:
    """https://github.com/vllm-project/vllm/issues/16832, https://github.com/vllm-project/vllm/issues/5952,
    https://github.com/vllm-project/vllm/issues/5543, https://github.com/LMCache/LMCache/issues/3688"""
    verify(workload)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.permutations(
        [Asked(n * 5, "abc", 12 + n, n, 0, "one", 0, "itself") for n in range(8)],
    ),
    budget=st.sampled_from([1, 7, 16, 17, 10_000]),
)
def test_the_order_of_a_batch_changes_no_seeded_token(requests: list[Asked], budget: int) -> None:
    """https://github.com/vllm-project/vllm/issues/17524, https://github.com/vllm-project/vllm/issues/51226"""
    verify((requests, {"max_num_batched_tokens": budget}, 200, None))


@pytest.mark.parametrize("swap", [0, 200 * PAGE_BYTES])
def test_every_step_is_a_good_moment_for_an_abort(swap: int) -> None:
    """https://github.com/sgl-project/sglang/issues/1674, https://github.com/LMCache/LMCache/issues/3688"""
    for at in range(75):
        victim = at % 4
        requests = [
            Asked(9 + 7 * n, "tail", 20, n, n % 2, "one", at if n == 3 else 0, "abort" if n == victim else "itself")
            for n in range(4)
        ]
        verify((requests, {"max_num_batched_tokens": 16, "swap_space_bytes": swap}, PAGES + 1, None))
