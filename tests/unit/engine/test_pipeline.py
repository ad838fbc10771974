"""Steps that overlap: what is under way when something ends, fails, makes way or runs out of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.endurance.random_model import write_random_model
from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor import ModelFailed
from engine.fake import FakeModel
from engine.launching import Launched, LaunchingModel, ThreadedModel, launching
from engine.model import load_model
from engine.request import EngineRequest, FinishReason, SamplingParams
from engine.runner import TorchModel
from engine.thread import EngineThread
from kernels.sampling import Sampled
from tests.unit.engine.bench import ENDLESS, PAGE_BYTES, Bench, expected, scripted
from tests.unit.kernels.isas import needs_library


class Answer:
    """A step whose answer may be kept back or spoilt."""

    def __init__(self, launched: Launched, before_answer: Callable[[], None]) -> None:
        self.launched = launched
        self._before_answer = before_answer

    def wait(self) -> Sampled:
        sampled = self.launched.wait()
        self._before_answer()
        return sampled


class Watched(ThreadedModel):
    """Does something before each launch and before each answer."""

    def __init__(self, model: FakeModel, before_launch: Callable[[], None], before_answer: Callable[[], None]) -> None:
        super().__init__(model)
        self._before_launch, self._before_answer = before_launch, before_answer

    def launch(self, batch: Batch, before: Launched | None) -> Launched:
        self._before_launch()
        assert before is None or isinstance(before, Answer)
        return Answer(super().launch(batch, before and before.launched), self._before_answer)

    def execute(self, batch: Batch) -> Sampled:
        return super().launch(batch, None).wait()


def nothing() -> None:
    """What a `Watched` does if it isn't told otherwise."""


def overlapped(
    model: FakeModel | None = None,
    before_launch: Callable[[], None] = nothing,
    before_answer: Callable[[], None] = nothing,
    pages: int = 200,
    **config: Any,
) -> Bench:
    """A bench whose steps overlap, watched."""
    model = model or FakeModel()
    config = {"page_size": 4, "kv_cache_bytes": pages * PAGE_BYTES, "max_seq_len": 4 * pages, **config}
    watched = Watched(model, before_launch, before_answer)
    return Bench(Engine(watched, EngineConfig("fake", warm_up=False, **config)), model)


def failing(times: set[int], error: Exception) -> Callable[[], None]:
    """Raises at the times that are counted in `times`."""
    count = 0

    def fail() -> None:
        nonlocal count
        count += 1
        if count in times:
            raise error

    return fail


def test_a_model_without_launches_gets_a_thread_when_asked_and_only_then() -> None:
    model = FakeModel()
    assert launching(model, "auto") is None
    assert launching(model, False) is None
    threaded = launching(model, True)
    assert isinstance(threaded, ThreadedModel)
    assert isinstance(threaded, LaunchingModel)
    assert launching(threaded, "auto") is threaded
    assert launching(threaded, False) is None
    threaded.close()


def test_the_next_step_is_launched_before_the_answer_of_the_last_one_is_there() -> None:
    gate, launches = threading.Semaphore(0), threading.Semaphore(0)

    class Gated(FakeModel):
        def execute(self, batch: Batch) -> Sampled:
            assert gate.acquire(timeout=60)
            return super().execute(batch)

    bench = overlapped(Gated(), before_launch=launches.release)
    bench.add("a", "ab", max_tokens=4)
    stepper = threading.Thread(target=bench.run)
    stepper.start()
    for _ in range(2):
        assert launches.acquire(timeout=60), "nothing was launched while a step was under way"
    assert bench.tokens == {}
    for _ in range(4):
        gate.release()
    stepper.join(60)
    assert bench.tokens["a"] == expected("ab", 4)


def test_a_step_after_which_the_host_decides_is_waited_for() -> None:
    under_way: list[int] = []

    def launch() -> None:
        under_way.append(1)
        assert len(under_way) == 1, "a penalised token was chosen without the one before it"

    bench = overlapped(before_launch=launch, before_answer=under_way.clear)
    assert len(bench.one("ab", max_tokens=6, frequency_penalty=0.5).token_ids) == 6


@pytest.mark.parametrize("length", range(1, 10))
def test_what_was_computed_past_an_end_is_dropped(length: int) -> None:
    """The end is found when a token behind it is under way: https://github.com/vllm-project/vllm/issues/16832"""
    bench = overlapped(scripted(list(b"abcdefghij")), pages=8)
    for name in "12":
        bench.add(name, "p", max_tokens=20, stop="abcdefghij"[:length])
        bench.run()
    assert {output.finish_reason for output in bench.outputs.values()} == {FinishReason.STOP}
    assert {len(output.token_ids) for output in bench.outputs.values()} == {length}
    assert bench.engine.stats().generation_tokens == 2 * length


def test_neighbours_keep_their_answers_when_somebody_has_left() -> None:
    bench = overlapped(max_num_batched_tokens=64)
    for number in range(5):
        bench.add(str(number), f"{number} asks", max_tokens=12, logprobs=1)
    for _ in range(3):
        bench.step()
    bench.engine.abort("1")
    bench.engine.abort("3")
    outputs = bench.run()
    for number in (0, 2, 4):
        assert outputs[str(number)].token_ids == expected(f"{number} asks", 12)
        assert len(outputs[str(number)].logprobs or ()) == 12


FAULTS = [RuntimeError("out of order"), MemoryError()]


@pytest.mark.parametrize("error", FAULTS, ids=str)
@pytest.mark.parametrize("where", ["before_launch", "before_answer"])
@pytest.mark.parametrize("time", range(1, 9))
def test_a_step_that_fails_once_harms_nobody(error: Exception, where: str, time: int) -> None:
    bench = overlapped(pages=30, max_num_batched_tokens=9, **{where: failing({time}, error)})
    for number in range(3):
        bench.add(str(number), f"{number} asks for it", max_tokens=7)
    for number, output in bench.run().items():
        assert output.token_ids == expected(f"{number} asks for it", 7)


@settings(max_examples=40)
@given(
    launches=st.sets(st.integers(1, 40), max_size=12),
    answers=st.sets(st.integers(1, 40), max_size=12),
    errors=st.tuples(st.sampled_from(FAULTS), st.sampled_from(FAULTS)),
    pages=st.sampled_from([10, 14, 30]),
    budget=st.sampled_from([3, 9, 64]),
    swap=st.sampled_from([0, 4 * PAGE_BYTES, 2**20]),
)
def test_steps_that_fail_again_and_again_harm_nobody(
    launches: set[int], answers: set[int], errors: tuple[Exception, Exception], pages: int, budget: int, swap: int
) -> None:
    """Requests make way, come back and end while steps fail at their launch and afterwards."""
    bench = overlapped(
        before_launch=failing(launches, errors[0]),
        before_answer=failing(answers, errors[1]),
        pages=pages,
        max_num_batched_tokens=budget,
        swap_space_bytes=swap,
    )
    for number in range(4):
        bench.add(str(number), f"{number} asks for it"[: 4 + 3 * number], max_tokens=5 + 4 * number)
    for number, output in bench.run().items():
        prompt = f"{number} asks for it"[: 4 + 3 * int(number)]
        assert output.token_ids == expected(prompt, 5 + 4 * int(number))
    bench.engine.close()


def test_a_model_that_breaks_with_a_step_under_way_is_given_up_and_nothing_is_left() -> None:
    broken: list[bool] = []

    class Breaking(FakeModel):
        def execute(self, batch: Batch) -> Sampled:
            if broken:
                raise RuntimeError("out of order")
            return super().execute(batch)

    bench = overlapped(Breaking())
    for number in range(3):
        bench.add(str(number), "a prompt", **ENDLESS)
    for _ in range(4):
        bench.step()
    broken.append(True)
    with pytest.raises(ModelFailed, match="out of order"):
        bench.run()
    assert len(bench.engine.abandon("given up").finished) == 3
    assert not bench.engine.has_work
    bench.engine.check()
    broken.clear()
    assert bench.one("a prompt").token_ids == expected("a prompt", 8)


@pytest.mark.parametrize("where", ["before_launch", "before_answer"])
def test_a_model_that_says_it_is_broken_is_believed(where: str) -> None:
    bench = overlapped(**{where: failing({3}, ModelFailed("a rank is gone"))})
    bench.add("a", "a prompt", max_tokens=20)
    with pytest.raises(ModelFailed, match="a rank is gone"):
        bench.run()
    bench.engine.abandon("given up")
    assert not bench.engine.has_work


def interruptions() -> Iterator[tuple[str, Callable[[Engine], None]]]:
    yield "sleep and wake", lambda engine: (engine.sleep(), engine.wake())  # type: ignore[func-returns-value]
    yield "less memory", lambda engine: engine.set_kv_bytes(20 * PAGE_BYTES)
    yield "tidying", lambda engine: engine.tidy() and None
    yield "everybody leaves", lambda engine: engine.abort_all()


@pytest.mark.parametrize(("name", "interrupt"), list(interruptions()), ids=[name for name, _ in interruptions()])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_whatever_happens_between_two_steps(name: str, interrupt: Callable[[Engine], None], steps: int) -> None:
    bench = overlapped(pages=40, max_seq_len=80)
    for number in range(4):
        bench.add(str(number), f"{number} asks for it", max_tokens=30)
    for _ in range(steps):
        bench.step()
    interrupt(bench.engine)
    bench.engine.check()
    for number, output in bench.run().items():
        whole = expected(f"{number} asks for it", 30)
        assert output.token_ids == whole[: len(output.token_ids)]
        assert (output.finish_reason is FinishReason.ABORT) == (name == "everybody leaves")


def test_the_engine_closes_with_a_step_under_way() -> None:
    bench = overlapped(FakeModel(step_s=0.05))
    bench.add("a", "a prompt", **ENDLESS)
    bench.step()
    bench.engine.close()
    bench.engine.close()


@pytest.mark.parametrize("guesses", [0, 4])
@pytest.mark.parametrize("load", [pytest.param("cpu", marks=needs_library), "torch"])
def test_a_real_model_says_the_same(load: str, guesses: int, tmp_path: Path) -> None:
    """Greedy and seeded, with rules and without, in so little memory that requests make way."""
    model = str(write_random_model(tmp_path / "model"))
    said = []
    for overlap in (False, True):
        config = EngineConfig(
            model, cache=tmp_path, dtype="float32", device="cpu", threads=2, max_seq_len=160, kv_cache_bytes=2**22,
            max_num_batched_tokens=40, num_speculative_tokens=guesses, warm_up=False, overlap=overlap,
        )  # fmt: skip
        loaded = TorchModel.load(config) if load == "torch" else load_model(config)
        engine = Engine(loaded, config)
        for n in range(6):
            prompt = tuple(3 + i % (5 + n) for i in range(9 + 7 * n))
            rules: dict[str, Any] = {"frequency_penalty": 1.0} if n == 4 else {"logprobs": 2} if n == 5 else {}
            params = SamplingParams(max_tokens=30, temperature=0.8 * (n % 2), seed=n, ignore_eos=True, **rules)
            engine.add(EngineRequest(str(n), params, prompt))
        outputs = {}
        while engine.has_work:
            outputs.update({output.request_id: output.token_ids for output in engine.step().finished})
            engine.check()
        engine.close()
        said.append(outputs)
    assert said[0] == said[1]


def test_the_engines_thread_leaves_no_device_behind() -> None:
    """Requests run, are dropped while they run, and the thread that was the device ends with the engine's own."""
    finished: dict[str, Any] = {}
    told = threading.Semaphore(0)

    class Listener:
        def on_admitted(self, request_id: str, admitted_s: float) -> None:
            pass

        def on_tokens(self, deltas: Any) -> None:
            pass

        def on_finished(self, outputs: Any) -> None:
            finished.update({output.request_id: output for output in outputs})
            told.release(len(outputs))

    others = {thread for thread in threading.enumerate() if thread.name.startswith("model-device")}
    host = EngineThread(FakeModel(step_s=0.002), EngineConfig("fake", overlap=True), Listener())
    host.start()
    for name, tokens in (("ends", 20), ("is dropped", 100_000)):
        host.submit(EngineRequest(name, SamplingParams(max_tokens=tokens, temperature=0.0), "ab"))
    assert told.acquire(timeout=60)
    host.abort("is dropped")
    assert told.acquire(timeout=60)
    host.stop()
    assert finished["ends"].token_ids == expected("ab", 20)
    assert finished["is dropped"].finish_reason is FinishReason.ABORT
    left = {thread for thread in threading.enumerate() if thread.name.startswith("model-device")}
    assert left <= others
