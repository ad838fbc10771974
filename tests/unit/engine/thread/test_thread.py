from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from headrace.contract import Reason

from engine.batch import Batch
from engine.config import EngineConfig
from engine.contract import EngineHost
from engine.fake import FakeModel
from engine.memory.budget import NoRoom
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams, TokenDelta
from engine.thread import EngineThread
from kernels.sampling import Sampled
from tests.unit.engine.thread.recorder import Make, Recorder, request


def test_a_request_is_admitted_streamed_and_finished_in_that_order(make: Make, recorder: Recorder) -> None:
    host: EngineHost = make()
    host.submit(request("a"))
    [output] = recorder.wait_for("a")
    assert recorder.order == [("admitted", "a"), *[("tokens", "a")] * 6, ("finished", "a")]
    assert output.text == recorder.texts["a"]
    assert recorder.threads == {"engine"}
    host.check()


def test_many_threads_may_submit(make: Make, recorder: Recorder) -> None:
    host = make()
    ids = [f"{thread}-{number}" for thread in range(4) for number in range(25)]

    def submit(thread: int) -> None:
        for number in range(25):
            host.submit(request(f"{thread}-{number}"))

    threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {output.finish_reason for output in recorder.wait_for(*ids)} == {FinishReason.LENGTH}
    assert host.stats().requests_finished == {"length": 100}


def test_what_was_submitted_before_the_start_runs(recorder: Recorder) -> None:
    host = EngineThread(FakeModel(), EngineConfig("fake"), recorder)
    host.submit(request("a"))
    assert host.stats().waiting == 1
    host.start()
    recorder.wait_for("a")
    host.stop()


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (request("bad", prompt=""), Reason.INVALID_REQUEST),
        (request("bad", prompt="x" * 5000), Reason.CONTEXT_LENGTH_EXCEEDED),
        (EngineRequest("bad", SamplingParams()), Reason.INVALID_REQUEST),
    ],
)
def test_a_request_that_cannot_run_ends_with_an_error_and_its_neighbours_go_on(
    make: Make, recorder: Recorder, bad: EngineRequest, code: Reason
) -> None:
    host = make()
    host.submit(request("good"))
    host.submit(bad)
    good, refused = recorder.wait_for("good", "bad")
    assert good.finish_reason is FinishReason.LENGTH
    assert (refused.finish_reason, refused.error_code) == (FinishReason.ERROR, code)
    assert refused.error
    assert ("admitted", "bad") not in recorder.order


def test_a_request_whose_preparation_fails_ends_with_an_error(make: Make, recorder: Recorder) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("broken")

    host = make()
    namespace: Any = Broken()
    host.submit(EngineRequest("bad", SamplingParams(), prompt=(1, 2), namespace=namespace))
    [output] = recorder.wait_for("bad")
    assert (output.finish_reason, output.error_code) == (FinishReason.ERROR, Reason.ENGINE_ERROR)


def test_an_id_that_is_live_is_refused_to_the_caller(make: Make, recorder: Recorder) -> None:
    host = make(FakeModel(step_s=0.01))
    host.submit(request("a", max_tokens=1000))
    with pytest.raises(ValueError, match="in the engine already"):
        host.submit(request("a"))
    host.abort("a")
    recorder.wait_for("a")
    recorder.outputs.clear()
    host.submit(request("a"))
    recorder.wait_for("a")


def test_an_abort_ends_a_running_request(make: Make, recorder: Recorder) -> None:
    host = make(FakeModel(step_s=0.002))
    host.submit(request("a", max_tokens=100_000))
    recorder.wait_tokens("a")
    host.abort("a")
    host.abort("a")
    host.abort("nobody")
    [output] = recorder.wait_for("a")
    assert output.finish_reason is FinishReason.ABORT
    assert output.text == recorder.texts["a"]
    host.check()
    stats = host.stats()
    assert stats.pages_free == stats.pages_total


def test_an_abort_right_after_the_submit_is_kept(make: Make, recorder: Recorder) -> None:
    """Even while the prompt is being tokenised."""
    host = make()
    ids = [str(number) for number in range(30)]
    for number in ids:
        host.submit(request(number, prompt="x" * 3000, max_tokens=900))
        host.abort(number)
    assert {output.finish_reason for output in recorder.wait_for(*ids)} == {FinishReason.ABORT}
    host.check()


def test_an_id_that_was_aborted_may_come_again_while_the_first_still_waits_for_the_tokenizer(
    make: Make, recorder: Recorder
) -> None:
    host = make()
    host.submit(request("long", prompt="word " * 100_000))
    host.submit(request("a", prompt="first"))
    host.abort("a")
    recorder.wait_for("a")
    recorder.outputs.clear()
    host.submit(request("a", prompt="second"))
    [output] = recorder.wait_for("a")
    assert output.prompt_token_ids == tuple(b"second")


def test_a_listener_that_raises_is_logged_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    class Rude(Recorder):
        def on_admitted(self, request_id: str, admitted_s: float) -> None:
            raise RuntimeError("rude")

        def on_tokens(self, deltas: Sequence[TokenDelta]) -> None:
            raise RuntimeError("rude")

        def on_finished(self, outputs: Sequence[RequestOutput]) -> None:
            super().on_finished(outputs)
            raise RuntimeError("rude")

    recorder = Rude()
    host = EngineThread(FakeModel(), EngineConfig("fake"), recorder)
    host.start()
    with caplog.at_level(logging.ERROR):
        for name in ("a", "b"):
            host.submit(request(name))
            recorder.wait_for(name)
        host.stop()
    assert caplog.text.count("listener raised") >= 4
    assert host.healthy


def test_a_request_at_fault_fails_alone(make: Make, recorder: Recorder) -> None:
    host = make()
    for name in ("a", "b", "c"):
        host.submit(request(name, prompt="<<raise:3>>" if name == "b" else "a prompt"))
    a, b, c = recorder.wait_for("a", "b", "c")
    assert (a.finish_reason, b.finish_reason, c.finish_reason) == ("length", "error", "length")
    assert host.healthy
    host.check()


class Broken(FakeModel):
    """Breaks down for good once `broken` is set."""

    broken = False

    def execute(self, batch: Batch) -> Sampled:
        if self.broken:
            raise RuntimeError("device lost")
        time.sleep(0.002)
        return super().execute(batch)


def test_a_broken_model_fails_everything_and_is_visible(
    make: Make, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    model = Broken()
    host = make(model, max_num_seqs=1)
    healthy_when_told: list[bool] = []
    tell = recorder.on_finished
    recorder.on_finished = lambda outputs: (healthy_when_told.append(host.healthy), tell(outputs))  # type: ignore[method-assign,assignment,func-returns-value]
    host.submit(request("runs", max_tokens=100_000))
    host.submit(request("waits"))
    recorder.wait_tokens("runs")
    model.broken = True
    for output in recorder.wait_for("runs", "waits"):
        assert (output.finish_reason, output.error_code) == (FinishReason.ERROR, Reason.ENGINE_ERROR)
    assert healthy_when_told == [False]
    assert not host.healthy
    assert "device lost" in (host.stats().failure or "")
    host.submit(request("late"))
    [late] = recorder.wait_for("late")
    assert late.error == host.stats().failure
    assert (host.stats().running, host.stats().waiting) == (0, 0)


def test_stop_aborts_what_runs_and_what_waits(recorder: Recorder) -> None:
    host = EngineThread(FakeModel(step_s=0.002), EngineConfig("fake", max_num_seqs=1), recorder)
    host.start()
    ids = ["runs", "waits", "arrives"]
    for name in ids:
        host.submit(request(name, max_tokens=100_000))
    recorder.wait_tokens("runs")
    host.stop()
    host.stop()
    assert {recorder.outputs[name].finish_reason for name in ids} == {FinishReason.ABORT}
    host.check()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine")]
    with pytest.raises(RuntimeError, match="stopping"):
        host.submit(request("late"))


def test_stop_before_the_start_ends_what_was_submitted(recorder: Recorder) -> None:
    host = EngineThread(FakeModel(), EngineConfig("fake"), recorder)
    host.submit(request("a"))
    host.stop()
    assert recorder.outputs["a"].finish_reason is FinishReason.ABORT


def test_an_idle_engine_sleeps(make: Make, recorder: Recorder) -> None:
    host = make()
    host.submit(request("a"))
    recorder.wait_for("a")
    steps, used_s = host.stats().steps, time.process_time()
    time.sleep(0.3)
    assert host.stats().steps == steps
    assert time.process_time() - used_s < 0.1


def test_what_comes_at_once_is_in_the_first_step(
    make: Make, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.thread.TOGETHER_S", 0.5)
    host = make()
    prepare = host._engine.prepare

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.02)
        return prepare(*arguments)

    monkeypatch.setattr(host._engine, "prepare", slowly)
    for name in "abc":
        host.submit(request(name))
    outputs = recorder.wait_for(*"abc")
    assert [output.metrics.mean_batch_size for output in outputs] == [3, 3, 3]


def test_the_admission_cap_holds_back_and_lets_go(make: Make, recorder: Recorder) -> None:
    host = make(FakeModel(step_s=0.001))
    host.set_max_num_seqs(0)
    host.submit(request("a"))
    host.check()
    time.sleep(0.05)
    assert "a" not in recorder.outputs
    assert (host.stats().waiting, host.stats().max_num_seqs) == (1, 0)
    host.set_max_num_seqs(2)
    recorder.wait_for("a")


def test_a_deadline_wakes_an_engine_that_sleeps(make: Make, recorder: Recorder) -> None:
    host = make()
    host.set_max_num_seqs(0)
    host.submit(request("waits", deadline_s=time.monotonic() + 0.1))
    [output] = recorder.wait_for("waits")
    assert (output.finish_reason, output.error_code) == (FinishReason.ABORT, Reason.DEADLINE_EXCEEDED)


def test_a_running_request_ends_at_its_deadline(make: Make, recorder: Recorder) -> None:
    host = make(FakeModel(step_s=0.001))
    host.submit(request("runs", max_tokens=100_000, deadline_s=time.monotonic() + 0.1))
    [output] = recorder.wait_for("runs")
    assert output.error_code == Reason.DEADLINE_EXCEEDED
    assert output.token_ids
    host.check()


def test_tokens_go_on_while_a_long_prompt_is_tokenised(make: Make, recorder: Recorder) -> None:
    """The step loop doesn't tokenise: steps happen between a long prompt's submission and its refusal."""
    host = make(FakeModel(step_s=0.001), max_seq_len=30_000)
    host.submit(request("runs", max_tokens=20_000))
    recorder.wait_tokens("runs")
    before = host.stats().generation_tokens
    host.submit(request("long", prompt="word " * 200_000))
    recorder.wait_for("long")
    assert host.stats().generation_tokens - before > 10
    host.abort("runs")
    recorder.wait_for("runs")


class TestMemory:
    def test_requests_wait_while_the_engine_sleeps_and_go_on_when_it_wakes(
        self, make: Make, recorder: Recorder
    ) -> None:
        host: EngineHost = make(FakeModel(step_s=0.001))
        host.submit(request("runs", max_tokens=200))
        recorder.wait_tokens("runs")
        host.sleep().result(20)
        host.check()
        host.submit(request("waits"))
        steps = host.stats().steps
        time.sleep(0.05)
        assert host.stats().steps == steps
        assert not recorder.outputs
        host.wake().result(20)
        assert [len(output.token_ids) for output in recorder.wait_for("runs", "waits")] == [200, 6]

    def test_the_size_of_the_kv_memory_changes_between_two_steps(self, make: Make, recorder: Recorder) -> None:
        host: EngineHost = make(FakeModel(step_s=0.001), kv_cache_bytes=2**24)
        host.submit(request("runs", max_tokens=100))
        recorder.wait_tokens("runs")
        host.set_kv_bytes(2**23).result(20)
        with pytest.raises(NoRoom, match="raise kv_cache_bytes"):
            host.set_kv_bytes(1000).result(20)
        recorder.wait_for("runs")
        host.check()
        assert host.stats().pages_total == 2**23 // (16 * 1024)

    def test_before_the_start_and_after_the_stop_it_is_done_at_once(self, recorder: Recorder) -> None:
        host = EngineThread(FakeModel(), EngineConfig("fake"), recorder)
        assert host.sleep().done()
        host.start()
        host.submit(request("a"))
        host.wake().result(20)
        recorder.wait_for("a")
        host.stop()
        assert host.sleep().done()
