"""Sequences that make way and come back, with their KV copied or computed again: no token depends on which."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.fake import FakeModel
from engine.memory import Page, PagePool
from engine.memory.swap import SwapSpace
from engine.preemption import COMPUTE_TOKENS_PER_S, COPY_BYTES_PER_S, Preemption
from engine.request import FinishReason
from engine.sequence import TokenSequence
from tests.unit.engine.bench import PAGE_BYTES, Bench, expected, make_bench

SWAPS = {"none": 0, "some": 6 * PAGE_BYTES, "all": 2**20}


def crowd(pages: int, count: int = 6, **config: Any) -> Bench:
    """Requests that need more pages together than there are."""
    bench = make_bench(pages=pages, **config)
    for number in range(count):
        bench.add(str(number), f"{number} asks", max_tokens=20 + number)
    return bench


class TestOutputs:
    @pytest.mark.parametrize("swap", SWAPS)
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize(("pages", "least", "most"), [(1000, 0, 0), (36, 1, 1), (26, 3, 6), (10, 5, 10_000)])
    def test_are_equal_with_none_one_three_and_many_preemptions(
        self, swap: str, caching: bool, pages: int, least: int, most: int
    ) -> None:
        """https://github.com/vllm-project/vllm/issues/16832"""
        bench = crowd(pages, swap_space_bytes=SWAPS[swap], enable_prefix_caching=caching)
        outputs = bench.run()
        assert least <= bench.engine.stats().preemptions <= most
        assert (bench.engine.stats().swaps > 0) == (swap != "none" and least > 0)
        for number in range(6):
            assert outputs[str(number)].token_ids == expected(f"{number} asks", 20 + number)

    @pytest.mark.parametrize("swap", SWAPS)
    def test_one_request_may_be_preempted_three_times(self, swap: str) -> None:
        """https://github.com/vllm-project/vllm/issues/16832"""
        bench = make_bench(pages=40, max_num_seqs=2, swap_space_bytes=SWAPS[swap])
        bench.add("low", "low priority", priority=5, max_tokens=60)
        for number in range(3):
            for _ in range(7):
                bench.step()
            for half in "ab":
                bench.add(f"{number}{half}", "urgent", max_tokens=5)
        outputs = bench.run()
        assert outputs["low"].metrics.preemptions == 3
        assert outputs["low"].token_ids == expected("low priority", 60)


class TestAbort:
    @pytest.mark.parametrize("swap", SWAPS)
    def test_is_exact_at_every_step(self, swap: str) -> None:
        """https://github.com/sgl-project/sglang/issues/1674, https://github.com/LMCache/LMCache/issues/3688"""
        whole = {str(n): expected(f"{n} asks", 20 + n) for n in range(4)}
        for at in range(90):
            bench = crowd(12, count=4, swap_space_bytes=SWAPS[swap])
            for _ in range(at):
                bench.step()
            victim = str(at % 4)
            had, already = bench.tokens.get(victim, ()), victim in bench.outputs
            bench.engine.abort(victim)
            bench.engine.check()
            for name, output in bench.run().items():
                if name == victim and not already:
                    assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, had)
                else:
                    assert output.token_ids == whole[name]

    def test_of_a_swapped_request_frees_the_hosts_memory(self) -> None:
        bench = crowd(12, swap_space_bytes=2**20)
        while not bench.engine.stats().swapped_pages:
            bench.step()
        bench.engine.abort_all()
        assert bench.engine.stats().swapped_pages == 0
        bench.run()


class TestCost:
    """A pool of pages that hold 4 tokens and 4096 bytes each."""

    def preemption(self, most_pages: int = 100) -> tuple[Preemption, PagePool]:
        model = FakeModel()
        layout = model.kv_layout(4)
        swap = SwapSpace(model.allocate_kv(layout, 1, 1), most_pages * layout.page_bytes)
        pool = PagePool(100, 4)
        return Preemption(pool, swap, clock=lambda: 0.0), pool

    def sequence(self, pool: PagePool, tokens: int) -> TokenSequence:
        pages = pool.allocate(pool.pages_for(tokens))
        return TokenSequence("a", [0] * tokens, tokens, tokens + 9, computed=tokens, pages=pages)

    def saves(self, preemption: Preemption, sequence: TokenSequence, monkeypatch: pytest.MonkeyPatch) -> bool:
        monkeypatch.setattr("engine.fake.FakeStorage.save_pages", lambda _self, pages: list(pages))
        preemption.save(sequence)
        saved = sequence.saved_tokens > 0
        preemption.discard(sequence)
        return saved

    def test_the_cheaper_way_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        preemption, pool = self.preemption()
        sequence = self.sequence(pool, 40)
        preemption.copy_bytes_per_s = 2 * 4096 * 10  # ten pages out and in: a second
        preemption.compute_tokens_per_s = 39
        assert self.saves(preemption, sequence, monkeypatch)
        preemption.compute_tokens_per_s = 41
        assert not self.saves(preemption, sequence, monkeypatch)

    def test_what_does_not_fit_is_computed_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        preemption, pool = self.preemption(most_pages=9)
        assert not self.saves(preemption, self.sequence(pool, 40), monkeypatch)
        assert self.saves(preemption, self.sequence(pool, 36), monkeypatch)

    def test_nothing_computed_is_nothing_saved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        preemption, pool = self.preemption()
        sequence = self.sequence(pool, 40)
        sequence.computed = 0
        assert not self.saves(preemption, sequence, monkeypatch)

    def test_a_host_without_memory_means_computing_again(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        preemption, pool = self.preemption()

        def fail(_self: object, _pages: list[Page]) -> None:
            raise MemoryError

        monkeypatch.setattr("engine.fake.FakeStorage.save_pages", fail)
        sequence = self.sequence(pool, 40)
        with caplog.at_level(logging.WARNING):
            preemption.save(sequence)
        assert (sequence.saved_tokens, preemption.swaps, preemption.swapped_pages) == (0, 0, 0)
        preemption.check([sequence])

    def test_rates_are_learned_from_what_takes_long_enough_to_measure(self) -> None:
        preemption, _ = self.preemption()
        preemption.note_step(tokens=10, took_s=1.0)
        preemption.note_step(tokens=1000, took_s=1e-6)
        assert preemption.compute_tokens_per_s == COMPUTE_TOKENS_PER_S
        for _ in range(50):
            preemption.note_step(tokens=1000, took_s=1.0)
        assert preemption.compute_tokens_per_s == pytest.approx(1000, rel=0.01)
        assert preemption.copy_bytes_per_s == COPY_BYTES_PER_S

    def test_pages_that_were_found_again_are_not_written_to(self) -> None:
        """A page that others hold too may have been computed in another batch: its bits are theirs."""
        bench = make_bench(pages=40, max_num_seqs=2)
        bench.add("low", "the same prompt", priority=5, max_tokens=40)
        for _ in range(5):
            bench.step()
        bench.add("urgent", "the same prompt", max_tokens=20)
        bench.add("urgent too", "the same prompt", max_tokens=20)
        bench.step()
        assert bench.engine.stats().swapped_pages > 0
        written: list[int] = []
        storage = bench.engine._memory.storage
        load = storage.load_pages
        storage.load_pages = lambda saved, pages: (written.extend(pages), load(saved, pages))  # type: ignore[method-assign,func-returns-value]
        while "0:low" not in [s.id for s in bench.engine._scheduler.running]:
            bench.step()
        [low] = [s for s in bench.engine._scheduler.running if s.id == "0:low"]
        assert written
        assert all(page.refs == 1 for page in low.pages if page.id in written)
        bench.run()
