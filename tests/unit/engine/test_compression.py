"""Requests whose KV is thinned: what they hold, what is dropped, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compression import KVCompression
from engine.engine import Engine
from engine.fake import FakeModel
from engine.pooling import Pooling
from engine.request import EngineRequest, SamplingParams
from kernels.kv import Thinning
from tests.unit.engine.bench import Bench, expected, make_bench

HALF = KVCompression(0.5, sink_tokens=2, window_tokens=32)
QUARTER = KVCompression(0.25, sink_tokens=3, window_tokens=24)
COMPRESSIONS = st.builds(
    KVCompression,
    ratio=st.floats(0.01, 1.0),
    sink_tokens=st.integers(0, 20),
    window_tokens=st.integers(2, 64),
)


class TestSchedule:
    @given(COMPRESSIONS, st.integers(1, 600))
    def test_walking_to_a_position_holds_what_is_said(self, compression: KVCompression, tokens: int) -> None:
        computed = slots = most = 0
        while computed < tokens:
            end = min(tokens, compression.next_stop(computed)) if compression.thins else tokens
            computed, slots = end, slots + end - computed
            most = max(most, slots)
            if computed < tokens and compression.thins and compression.due(computed, slots):
                work = compression.thinning([], computed, slots)
                assert work.tokens == slots > work.kept >= compression.ratio * computed
                slots = work.kept
                assert compression.touches(tokens)
        assert most == compression.most_slots(tokens)
        assert slots in (compression.slots(computed), most)
        assert most <= compression.ratio * tokens + compression.sink_tokens + compression.window_tokens + 1

    @given(COMPRESSIONS, st.integers(1, 600))
    def test_longer_requests_never_hold_less(self, compression: KVCompression, tokens: int) -> None:
        assert compression.most_slots(tokens) <= compression.most_slots(tokens + 1)

    def test_a_ratio_of_one_keeps_all(self) -> None:
        whole = KVCompression()
        assert not whole.thins
        assert not whole.touches(10**6)
        assert whole.slots(10**6) == whole.most_slots(10**6) == 10**6

    @pytest.mark.parametrize("ratio", [0, 0.0, -0.5, 1.01, float("nan"), "half", True, None])
    def test_a_ratio_that_is_no_share_is_refused_with_what_to_change(self, ratio: Any) -> None:
        with pytest.raises(ValueError, match=r"kv_compression\.ratio is the share .* set it to a number over 0 and at"):
            KVCompression(ratio)

    @pytest.mark.parametrize("wrong", [{"sink_tokens": -1}, {"window_tokens": 1}, {"window_tokens": 2.5}])
    def test_other_numbers_are_refused_by_name(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=rf"kv_compression\.{next(iter(wrong))} must be a whole number"):
            KVCompression(0.5, **wrong)

    def test_more_than_the_ends_has_to_be_kept(self) -> None:
        with pytest.raises(ValueError, match="can't be kept"):
            Thinning([0], tokens=10, kept=5, first=3, last=3)


def thin_bench(pages: int, compression: KVCompression = HALF, model: FakeModel | None = None, **config: Any) -> Bench:
    config = {"max_seq_len": 400, "memory_margin": 0.0, **config}
    return make_bench(model, pages, kv_compression=compression, **config)


def slots(bench: Bench) -> list[int]:
    return [sequence.slots for sequence in bench.engine._scheduler.running]


def text(number: int, length: int) -> str:
    """Texts that have no pages in common."""
    return "".join(chr(97 + (7 * at * (number + 1) + at // 3 + number) % 26) for at in range(length))


@pytest.mark.parametrize("compression", [HALF, QUARTER], ids=["half", "quarter"])
@pytest.mark.parametrize("budget", [1024, 7])
def test_a_request_never_holds_more_than_its_share(compression: KVCompression, budget: int) -> None:
    bench = thin_bench(100, compression, max_num_batched_tokens=budget)
    prompt = text(0, 150)
    bench.add("one", prompt, max_tokens=150)
    pool = bench.engine._scheduler.pool
    held, freed = [], 0
    while bench.engine.has_work:
        before = pool.held
        bench.engine._thin()
        assert pool.held <= before
        freed += before - pool.held
        bench.step()
        for sequence in bench.engine._scheduler.running:
            bound = compression.ratio * len(sequence.tokens) + compression.sink_tokens + compression.window_tokens
            assert sequence.slots <= bound + 1
            assert len(sequence.pages) <= pool.pages_for(int(bound) + 2)
            held.append(pool.held)
    assert bench.tokens["one"] == expected(prompt, 150)
    assert max(held) < 0.7 * 300 / 4
    assert freed > 5, "no page returns to the pool"


def test_short_requests_are_not_touched_and_share_their_prefix() -> None:
    bench = thin_bench(100, KVCompression(0.5, window_tokens=100))
    prompt = text(0, 60)
    for name in ("first", "second"):
        bench.add(name, prompt, max_tokens=20)
        bench.run()
        assert bench.tokens[name] == expected(prompt, 20)
    assert bench.outputs["second"].metrics.cached_tokens == 56


def test_what_may_be_thinned_is_never_shared() -> None:
    bench = thin_bench(200)
    for name in ("first", "second"):
        bench.add(name, text(0, 100), n=2, max_tokens=40)
    bench.run()
    assert bench.engine._scheduler.pool.cached == 0
    assert {output.metrics.cached_tokens for output in bench.outputs.values()} == {0}
    assert {tokens for _, tokens in bench.others.values()} == {bench.tokens["first"]} == {expected(text(0, 100), 40)}


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_text_that_is_embedded_is_computed_to_its_last_token(beyond: int) -> None:
    bench = thin_bench(100)
    bench.model.info = replace(bench.model.info, pooling=Pooling("last"))
    engine = Engine(bench.model, bench.engine._config)
    prompt = text(0, HALF.first_stop + beyond)
    choices = engine.prepare(EngineRequest("one", SamplingParams(max_tokens=0), prompt, embeds=True), 0.0)
    assert (choices.generations[0].sequence.root is None) == (beyond == 1)


@pytest.mark.parametrize("swap_space_bytes", [0, 2**20], ids=["computed again", "swapped"])
def test_who_makes_way_comes_back_with_what_it_had(swap_space_bytes: int) -> None:
    bench = thin_bench(70, max_seq_len=300, swap_space_bytes=swap_space_bytes)
    bench.engine._scheduler.running.preemption.compute_tokens_per_s = 1.0
    for number in range(4):
        bench.add(str(number), text(number, 60 + 9 * number), max_tokens=120)
    bench.run()
    for number in range(4):
        assert bench.tokens[str(number)] == expected(text(number, 60 + 9 * number), 120)
    assert sum(output.metrics.preemptions for output in bench.outputs.values()) > 0
    assert (bench.engine.stats().swaps > 0) == (swap_space_bytes > 0)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 60), st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(
    compression=st.builds(
        KVCompression, st.sampled_from([0.1, 0.25, 0.5, 0.9]), sink_tokens=st.integers(0, 9),
        window_tokens=st.integers(2, 50),
    ),
    requests=REQUESTS,
    budget=st.sampled_from([5, 16, 1024]),
    pages=st.integers(48, 90),
    swap_space_bytes=st.sampled_from([0, 2**20]),
)  # fmt: skip
def test_any_history_gives_every_request_its_own(
    compression: KVCompression,
    requests: list[tuple[int, int, int, int]],
    budget: int,
    pages: int,
    swap_space_bytes: int,
) -> None:
    """Requests of all lengths and ranks come and make way; the bench checks every page after every step."""
    bench = thin_bench(
        pages, compression, max_seq_len=180, max_num_batched_tokens=budget, swap_space_bytes=swap_space_bytes
    )
    for step in range(31):
        for number, (length, max_tokens, arrives, priority) in enumerate(requests):
            if arrives == step:
                bench.add(str(number), text(number, length), max_tokens=max_tokens, priority=priority)
        bench.step()
    bench.run()
    for number, (length, max_tokens, _, _) in enumerate(requests):
        assert bench.tokens[str(number)] == expected(text(number, length), max_tokens)


def test_one_that_waits_to_be_thinned_may_make_way() -> None:
    """Between the step that brought it to a stop and the one that thins it, somebody more urgent takes its place."""
    bench = thin_bench(60, max_num_seqs=1, swap_space_bytes=2**20)
    bench.engine._scheduler.running.preemption.compute_tokens_per_s = 1.0
    bench.add("low", text(0, 40), priority=2, max_tokens=60)
    while not bench.engine._scheduler.running.due():
        bench.step()
    bench.engine.set_kv_bytes(bench.engine._memory.budget.kv_bytes)
    bench.engine._scheduler.make_room(0, 0.0)
    bench.engine.check()
    bench.run()
    assert bench.tokens["low"] == expected(text(0, 40), 60)


def test_more_requests_fit_into_the_same_memory() -> None:
    def preemptions(compression: KVCompression) -> int:
        bench = thin_bench(90, compression, max_seq_len=240)
        for number in range(4):
            bench.add(str(number), text(number, 80), max_tokens=100)
        bench.run()
        return sum(output.metrics.preemptions for output in bench.outputs.values())

    assert preemptions(KVCompression()) > 0
    assert preemptions(KVCompression(0.25, window_tokens=16)) == 0


def test_a_pool_that_holds_a_share_takes_the_whole_context() -> None:
    with pytest.raises(ValueError, match="one request of 400 tokens needs"):
        thin_bench(60, KVCompression())
    bench = thin_bench(60)
    bench.add("long", text(0, 300), max_tokens=100)
    bench.run()
    assert bench.tokens["long"] == expected(text(0, 300), 100)


def test_guesses_stop_where_a_request_is_thinned() -> None:
    bench = thin_bench(100, model=FakeModel(choose=lambda _token, at: 97 + at % 3, cheap_rows=8))
    bench.add("one", "abcabcabcabc", max_tokens=200)
    bench.run()
    stats = bench.engine.stats()
    assert stats.accepted_tokens > 50
    assert bench.tokens["one"] == tuple(97 + at % 3 for at in range(12, 212))


def test_one_that_cannot_be_thinned_fails_alone() -> None:
    class Failing(FakeModel):
        def thin(self, work: Thinning) -> None:
            if work.tokens > 60:
                raise MemoryError("no room to sort")
            super().thin(work)

    bench = thin_bench(200, model=Failing())
    bench.add("long", text(0, 160), max_tokens=20)
    bench.add("short", text(1, 40), max_tokens=20)
    bench.run()
    assert bench.outputs["long"].error == "MemoryError: no room to sort"
    assert bench.tokens["short"] == expected(text(1, 40), 20)


def test_what_is_thinned_wrongly_would_be_noticed() -> None:
    class Wrong(FakeModel):
        def thin(self, work: Thinning) -> None:
            super().thin(Thinning(work.pages[::-1], work.tokens, work.kept, work.first, work.last))

    bench = thin_bench(100, model=Wrong())
    bench.add("one", text(0, 100), max_tokens=20)
    with pytest.raises(AssertionError, match="thinned request"):
        bench.run()


def test_prompts_are_scored_and_texts_embedded_while_they_are_thinned() -> None:
    bench = thin_bench(100)
    assert isinstance(bench.engine, Engine)
    bench.add("scored", text(0, 120), max_tokens=1, prompt_logprobs=1)
    bench.run()
    scores = bench.outputs["scored"].prompt_logprobs
    assert scores is not None
    assert len(scores) == 120
