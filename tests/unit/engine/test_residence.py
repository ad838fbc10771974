"""The engine's memory while requests run: it grows, shrinks, sleeps and wakes, and no token changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import TIDY_EVERY
from engine.fake import FakeModel, FakeStorage
from engine.memory.budget import NoRoom
from engine.memory.machine import DeviceMemory
from engine.residence import RELEASE_EVERY_S, Residence
from kernels.kv import KVLayout
from kernels.sampling import Sampled
from tests.unit.engine.bench import Bench, RaisingModel, make_bench

PAGE_BYTES = 2**20
PROMPTS = ["a prompt", "another, longer prompt", "p", "the same prompt", "the same prompt"]


def bench_of(pages: int, **config: Any) -> Bench:
    """Pages of 4 tokens, 4 of them to an extent."""
    model = FakeModel(kv_bytes_per_token=PAGE_BYTES // 4)
    assert model.kv_layout(4).pages_per_extent == 4
    return make_bench(model, kv_cache_bytes=pages * PAGE_BYTES, **{"max_seq_len": 48, **config})


def expected(prompt: str, max_tokens: int) -> str:
    return make_bench().one(prompt, max_tokens=max_tokens).text


class EngineMachine(RuleBasedStateMachine):
    """Whatever is done to the memory between two steps, each request gets its own text."""

    @initialize(pages=st.integers(12, 60), budget=st.integers(1, 40), swap=st.sampled_from([0, 5, 100]))
    def start(self, pages: int, budget: int, swap: int) -> None:
        self.bench = bench_of(pages, max_num_batched_tokens=budget, swap_space_bytes=swap * PAGE_BYTES)
        self.requests: dict[str, tuple[str, int]] = {}
        self.aborted: set[str] = set()

    @rule(prompt=st.sampled_from(PROMPTS), output=st.integers(1, 20))
    def add(self, prompt: str, output: int) -> None:
        number = str(len(self.requests))
        self.requests[number] = prompt, output
        self.bench.add(number, prompt, max_tokens=output)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [number for number in self.requests if number not in self.bench.outputs]
        if alive:
            number = data.draw(st.sampled_from(alive))
            self.aborted.add(number)
            self.bench.engine.abort(number)
            self.bench.step()

    @rule(pages=st.integers(8, 80))
    def resize(self, pages: int) -> None:
        if pages < 12:
            with pytest.raises(NoRoom, match="one request of 48 tokens"):
                self.bench.engine.set_kv_bytes(pages * PAGE_BYTES)
        else:
            self.bench.engine.set_kv_bytes(pages * PAGE_BYTES)
            assert self.bench.engine.stats().pages_total == pages

    @rule()
    def sleep(self) -> None:
        self.bench.engine.sleep()

    @rule()
    def wake(self) -> None:
        self.bench.engine.wake()

    @rule()
    def tidy(self) -> None:
        while self.bench.engine.tidy():
            self.bench.engine.check()

    @invariant()
    def whole(self) -> None:
        self.bench.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.engine.wake()
            outputs = self.bench.run()
            for number, (prompt, output) in self.requests.items():
                if number not in self.aborted:
                    assert outputs[number].text == expected(prompt, output)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def started(bench: Bench, steps: int = 6) -> None:
    for number, prompt in enumerate(PROMPTS):
        bench.add(str(number), prompt, max_tokens=20)
    for _ in range(steps):
        bench.step()


def finished(bench: Bench) -> None:
    outputs = bench.run()
    assert [outputs[str(i)].text for i in range(len(PROMPTS))] == [expected(prompt, 20) for prompt in PROMPTS]


class TestSleep:
    def test_running_requests_wait_and_go_on_as_if_nothing_had_happened(self) -> None:
        bench = bench_of(40)
        started(bench)
        bench.engine.sleep()
        bench.engine.sleep()
        assert (bench.engine.has_work, bench.engine.stats().running, bench.engine.stats().waiting) == (False, 0, 5)
        assert bench.engine.stats().pages_free == 40
        bench.step()
        bench.engine.wake()
        bench.engine.wake()
        finished(bench)

    def test_requests_that_arrive_meanwhile_wait_and_may_be_aborted(self) -> None:
        bench = bench_of(40)
        bench.engine.sleep()
        bench.add("a", "p")
        bench.add("b", "p")
        assert not bench.engine.has_work
        bench.engine.abort("a")
        assert bench.engine.has_work
        bench.step()
        assert list(bench.outputs) == ["a"]
        bench.engine.wake()
        assert bench.run()["b"].text == expected("p", 8)

    def test_it_sleeps_on_if_the_weights_cannot_be_had(self) -> None:
        bench = bench_of(40)
        started(bench)
        bench.engine.sleep()
        bench.model.wake = _raise  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no such file"):
            bench.engine.wake()
        assert not bench.engine.has_work
        del bench.model.wake
        bench.engine.wake()
        finished(bench)

    def test_it_sleeps_on_if_there_is_no_memory_for_the_kv(self) -> None:
        bench = bench_of(40)
        started(bench)
        bench.engine.sleep()
        slept: list[bool] = []
        bench.model.allocate_kv = _raise  # type: ignore[method-assign]
        bench.model.sleep = lambda: slept.append(True)  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no such file"):
            bench.engine.wake()
        assert (bench.engine.asleep, slept) == (True, [True])
        del bench.model.allocate_kv, bench.model.sleep
        bench.engine.wake()
        finished(bench)


def _raise(*_: Any) -> None:
    raise OSError("no such file")


class TestSize:
    def test_a_smaller_memory_lets_the_last_in_rank_make_way(self) -> None:
        bench = bench_of(40)
        started(bench)
        bench.engine.set_kv_bytes(12 * PAGE_BYTES)
        assert bench.engine.stats().pages_total == 12
        assert 0 < bench.engine.stats().preemptions < 5
        finished(bench)

    def test_a_larger_memory_takes_more_requests(self) -> None:
        bench = bench_of(12)
        started(bench, steps=1)
        assert bench.engine.stats().running < 5
        bench.engine.set_kv_bytes(200 * PAGE_BYTES)
        for _ in range(3):  # the last prompt waits for the one like it
            bench.step()
        assert bench.engine.stats().running == 5

    def test_a_size_that_is_not_there_or_too_small_changes_nothing(self) -> None:
        bench = bench_of(40)
        started(bench)
        with pytest.raises(NoRoom, match="lower max_seq_len to 44, or raise kv_cache_bytes to 12582912"):
            bench.engine.set_kv_bytes(11 * PAGE_BYTES)
        with pytest.raises(NoRoom, match="can't grow to"):
            bench.engine.set_kv_bytes(2**40)
        assert bench.engine.stats().pages_total == 40
        finished(bench)


@pytest.mark.in_turn
def test_idle_memory_is_compacted_past_thirty_percent_and_empty_extents_are_given_back() -> None:
    bench = bench_of(40, enable_prefix_caching=False)
    for number in range(8):
        bench.add(str(number), "p" * 12, max_tokens=2 if number % 4 else 30)
    bench.step()
    bench.step()
    memory: Residence = bench.engine._memory
    assert memory.pool.fragmentation > 0.3
    before = memory.pool.extents.leased
    while bench.engine.tidy():
        bench.engine.check()
    assert memory.pool.extents.leased < before
    assert memory.pool.fragmentation <= 0.3
    bench.run()


def test_memory_is_given_back_once_nobody_has_used_it_for_a_while() -> None:
    now_s = 0.0
    bench = bench_of(40, clock=lambda: now_s, enable_prefix_caching=False)
    buddy = bench.engine._memory.pool.extents.buddy
    released: list[tuple[int, int]] = []
    bench.engine._memory.storage.decommit = released.extend  # type: ignore[method-assign]
    bench.add("0", "p" * 12, max_tokens=5)
    bench.run()
    assert buddy.has_stale
    assert not bench.engine.tidy(), "what was used just now may be wanted again"
    now_s += RELEASE_EVERY_S / 2
    assert (bench.engine.rest_s(), bench.engine.tidy(), released) == (RELEASE_EVERY_S / 2, False, [])
    now_s += RELEASE_EVERY_S / 2
    assert bench.engine.rest_s() == 0.0
    assert bench.engine.tidy()
    assert released
    assert not buddy.has_stale
    assert bench.engine.rest_s() is None


def test_a_busy_engine_moves_its_pages_together_between_steps() -> None:
    bench = bench_of(400, enable_prefix_caching=False, max_seq_len=160)
    for number in range(8):
        bench.add(str(number), "p" * 12, max_tokens=60 if number % 4 else 100)
    while bench.engine.stats().steps < TIDY_EVERY - 1:
        bench.step()
    memory: Residence = bench.engine._memory
    assert memory.pool.fragmentation > 0.3
    before = memory.pool.extents.leased
    bench.step()
    assert memory.pool.extents.leased < before
    assert {bench.run()[name].text for name in "04"} == {expected("p" * 12, 100)}


@pytest.mark.in_turn
def test_a_step_without_memory_gives_back_what_is_only_cached() -> None:
    model = RaisingModel(lambda batch: model.calls == 20 and _out_of_memory())
    bench = make_bench(model, pages=40)
    bench.one("a long prompt that stays in the cache", max_tokens=2)
    memory: Residence = bench.engine._memory
    assert memory.pool.cached > 0
    model.calls = 18
    bench.add("a", "x" * 10, max_tokens=6)
    bench.step()
    assert memory.pool.cached > 0
    bench.step()
    assert (memory.pool.cached, memory.pool.held > 0) == (0, True)
    assert bench.run()["a"].text == expected("x" * 10, 6)


def _out_of_memory() -> bool:
    raise MemoryError


class Hungry(FakeModel):
    """Uses more memory for a step than its structure tells, and keeps some of it."""

    def __init__(self, step_bytes: int, kept_bytes: int) -> None:
        super().__init__(kv_bytes_per_token=PAGE_BYTES // 4)
        self.step_bytes, self.kept_bytes = step_bytes, kept_bytes
        self.used_bytes = self.peak_bytes = 2**28
        self.steps = 0

    @property
    def default_kv_bytes(self) -> None:  # type: ignore[override]
        return None

    def memory(self) -> DeviceMemory:
        return DeviceMemory(2**30, self.used_bytes)

    def take_peak_bytes(self) -> int:
        peak, self.peak_bytes = self.peak_bytes, self.used_bytes
        return peak

    def activation_bytes(self, tokens: int, rows: int) -> int:
        return tokens * 2**14

    def execute(self, batch: Batch) -> Sampled:
        if not self.steps:
            self.used_bytes += self.kept_bytes
        self.steps += 1
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + self.step_bytes)
        return super().execute(batch)

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> FakeStorage:
        return super().allocate_kv(layout, units, units)


class TestVerification:
    """The estimate is 2 MiB for 128 tokens and 16 MiB for the budget of 1024, on a device of 1 GiB."""

    CONFIG = EngineConfig("fake", page_size=4, max_seq_len=512, gpu_memory_utilization=1.0)

    def test_a_step_within_the_estimate_leaves_it_as_it_is(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            memory = Residence(Hungry(2**21, 0), self.CONFIG)
        assert memory.budget.kv_bytes == 2**30 - 2**28 - 2**24
        assert "a step of 128 tokens used 2097152 bytes, 2097152 were expected" in caplog.text

    def test_a_step_that_uses_more_corrects_it_in_proportion(self, caplog: pytest.LogCaptureFixture) -> None:
        memory = Residence(Hungry(2**21 + 1000, 0), self.CONFIG)
        assert memory.budget.activation_bytes == 2**24 + 8000
        assert memory.budget.kv_bytes == 2**30 - 2**28 - 2**24 - 8000
        assert "activations are taken to be 16785216 bytes" in caplog.text

    def test_what_the_first_step_keeps_is_in_use(self) -> None:
        memory = Residence(Hungry(2**21, 2**26), self.CONFIG)
        assert memory.budget.kv_bytes == 2**30 - 2**28 - 2**26 - 2**24

    def test_a_device_that_turns_out_too_small_is_refused(self) -> None:
        Residence(Hungry(0, 2**29), self.CONFIG)
        with pytest.raises(NoRoom, match="one request of 512 tokens"):
            Residence(Hungry(0, 2**29 + 2**28 - 2**24 - 2**26), self.CONFIG)

    def test_it_can_be_left_out(self) -> None:
        model = Hungry(2**25, 0)
        memory = Residence(model, EngineConfig("fake", max_seq_len=512, gpu_memory_utilization=1.0, warm_up=False))
        assert (model.steps, memory.budget.activation_bytes) == (0, 2**24)
