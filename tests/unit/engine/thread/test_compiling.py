"""Only requests that need a grammar compiled wait for a compiler."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
from headrace.contract import Reason
from llguidance import LLMatcher

from engine.grammar import Grammars
from engine.request import EngineRequest, FinishReason, SamplingParams
from tests.unit.engine.thread.recorder import Make, Recorder, request
from text.grammar import Grammar


def constrained(id: str, regex: str = "[0-9]{3}") -> EngineRequest:  # noqa: A002
    return EngineRequest(id, SamplingParams(max_tokens=6, guided_regex=regex), prompt="a prompt")


class Gate:
    """Compilers wait until it is open."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self.open = threading.Event()

    def pass_through(self) -> None:
        self.reached.release()
        assert self.open.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, compile_ = Gate(), Grammars._compile

    def compile_behind_it(grammars: Grammars, grammar: Grammar) -> LLMatcher:
        gate.pass_through()
        return compile_(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", compile_behind_it)
    yield gate
    gate.open.set()


def test_a_plain_request_overtakes_one_whose_grammar_is_compiled(gate: Gate, make: Make, recorder: Recorder) -> None:
    host = make()
    host.submit(constrained("slow"))
    assert gate.reached.acquire(timeout=20)
    host.submit(request("plain"))
    recorder.wait_for("plain")
    assert host.stats().waiting == 1
    gate.open.set()
    [slow] = recorder.wait_for("slow")
    assert re.fullmatch("[0-9]{3}", slow.text)
    order = [event for event in recorder.order if event[0] != "tokens"]
    assert order == [(event, name) for name in ("plain", "slow") for event in ("admitted", "finished")]
    host.check()


def test_so_does_one_whose_grammar_is_known(gate: Gate, make: Make, recorder: Recorder) -> None:
    host = make()
    gate.open.set()
    host.submit(constrained("first", "[a-z]{3}"))
    recorder.wait_for("first")
    gate.open.clear()
    host.submit(constrained("slow"))
    host.submit(constrained("known", "[a-z]{3}"))
    [known] = recorder.wait_for("known")
    assert re.fullmatch("[a-z]{3}", known.text)
    assert "slow" not in recorder.outputs
    gate.open.set()
    recorder.wait_for("slow")


def test_an_abort_is_told_at_once_and_its_id_may_come_again(gate: Gate, make: Make, recorder: Recorder) -> None:
    host = make()
    host.submit(constrained("a"))
    assert gate.reached.acquire(timeout=20)
    host.abort("a")
    [aborted] = recorder.wait_for("a")
    assert aborted.finish_reason is FinishReason.ABORT
    recorder.outputs.clear()
    host.submit(constrained("a", "[a-z]{3}"))
    host.submit(constrained("b", "[x-z]{3}"))
    host.abort("b")
    recorder.wait_for("b")
    gate.open.set()
    [output] = recorder.wait_for("a")
    assert re.fullmatch("[a-z]{3}", output.text)
    assert host.stats().requests_finished == {"abort": 2, "stop": 1}
    host.check()


def test_a_stop_aborts_what_waits_for_it(gate: Gate, make: Make, recorder: Recorder) -> None:
    host = make()
    for name in ("compiled", "waits"):
        host.submit(constrained(name))
    assert gate.reached.acquire(timeout=20)
    stopping = threading.Thread(target=host.stop)
    stopping.start()
    assert {output.finish_reason for output in recorder.wait_for("compiled", "waits")} == {FinishReason.ABORT}
    gate.open.set()
    stopping.join(20)
    assert not stopping.is_alive()


def test_a_grammar_without_a_meaning_is_refused(make: Make, recorder: Recorder) -> None:
    host = make()
    host.submit(constrained("bad", "("))
    [output] = recorder.wait_for("bad")
    assert (output.finish_reason, output.error_code) == (FinishReason.ERROR, Reason.INVALID_REQUEST)
    assert "guided_regex" in (output.error or "")
