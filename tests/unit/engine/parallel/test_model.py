"""A model over several processes: what one device gives, and nothing left behind when a process dies."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.executor import ModelFailed
from engine.model import load_model
from engine.model.spec import UnsupportedModel
from engine.parallel.model import ParallelModel
from engine.request import EngineRequest, FinishReason, RequestOutput
from engine.roster import ENGINE_ERROR
from engine.thread import EngineThread
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.engine.stepping import prompts
from tests.unit.engine.thread.recorder import Recorder

CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_seq_len": 256,
    "kv_cache_bytes": 2**24,
    "max_num_seqs": 8,
    "warm_up": False,
}
WIDE = {"intermediate_size": 98304, "num_hidden_layers": 1}
"""So wide that a step of 200 tokens needs more than 100 MiB on each of two ranks."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), "Llama")[1]


@pytest.fixture
def config(path: Path, tmp_path: Path) -> Callable[..., EngineConfig]:
    def make(ranks: int = 2, **changes: Any) -> EngineConfig:
        return EngineConfig(
            **({"model": str(path), "cache": tmp_path} | CONFIG | {"tensor_parallel_size": ranks} | changes)
        )

    return make


@pytest.fixture
def load(config: Callable[..., EngineConfig]) -> Iterator[Callable[..., ParallelModel]]:
    """Load a model over some ranks; at the end of the test none of its processes may be left."""
    loaded: list[ParallelModel] = []

    def make(ranks: int = 2, **changes: Any) -> ParallelModel:
        model = load_model(config(ranks, **changes))
        assert isinstance(model, ParallelModel)
        loaded.append(model)
        return model

    yield make
    for model in loaded:
        model.close()
        assert not any(map(exists, model.process_ids))


def exists(process_id: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(process_ids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(exists, process_ids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(exists, process_ids))


def finish(engine: Engine, count: int = 6, max_tokens: int = 12) -> list[RequestOutput]:
    """Greedy and seeded requests, checked after each step."""
    for number, prompt in enumerate(prompts()[:count]):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=number % 2, seed=number, logprobs=1)
        engine.add(EngineRequest(str(number), sampling, tuple(prompt)))
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step().finished}
        engine.check()
    return [outputs[str(number)] for number in range(count)]


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.slow
def test_what_is_saved_keeps_its_number_through_a_sleep(load: Callable[..., ParallelModel]) -> None:
    model = load(2, page_size=4)
    layout = model.kv_layout(4)
    saved = []
    for _ in range(2):
        storage = model.allocate_kv(layout, 1, 1)
        saved.append(storage.save_pages([0, 1]))
        model.release_kv()
    assert saved[0].number != saved[1].number
    storage = model.allocate_kv(layout, 1, 1)
    storage.load_pages(saved[0], [2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_an_engine_over_two_processes_is_one_over_one(
    config: Callable[..., EngineConfig], load: Callable[..., ParallelModel], overlap: bool
) -> None:
    """Through preemption with pages copied out, moved pages, another size of the KV memory, and a sleep."""
    own = config(1, page_size=4)
    alone = Engine(load_model(own), own)
    expected = finish(alone)
    alone.close()
    asked = config(2, page_size=4, overlap=overlap)
    model = load(2, page_size=4)
    assert model.info.device == "cpu x 2"
    engine = Engine(model, asked)
    assert tokens(finish(engine)) == tokens(expected)

    for number, prompt in enumerate(prompts()[4:], 10):
        engine.add(EngineRequest(str(number), SamplingParams(max_tokens=40, temperature=0), tuple(prompt)))
    for _ in range(8):
        engine.step()
    preemption = engine._scheduler.running.preemption
    preemption.compute_tokens_per_s = 1.0  # so that copying pages out always pays
    engine.set_kv_bytes(engine._memory._layout.bytes_for(64))
    engine.sleep()
    assert preemption.swaps == 2
    engine.wake()
    while engine.has_work:
        engine.step()
        engine.check()
    engine.set_kv_bytes(CONFIG["kv_cache_bytes"])
    again = finish(engine)
    assert tokens(again) == tokens(expected)
    assert [output.logprobs is not None for output in again] == [True] * 6


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_makes_smaller_steps_of_all(
    config: Callable[..., EngineConfig], load: Callable[..., ParallelModel], tmp_path: Path
) -> None:
    """The kernel refuses one process the memory of a long prompt; the other has enough."""
    _, wide = save_random_model(tmp_path, "Llama", **WIDE)
    model = load(model=str(wide))
    engine = Engine(model, config(model=str(wide)))
    expected = tokens(finish(engine))
    long = tuple(prompts()[5] * 6)
    [other] = model.process_ids
    size_bytes = int(Path(f"/proc/{other}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(other, resource.RLIMIT_AS, (size_bytes + 100 * 2**20, -1))
    engine.add(EngineRequest("long", SamplingParams(max_tokens=4, temperature=0), long))
    outputs = engine.step().finished
    resource.prlimit(other, resource.RLIMIT_AS, (-1, -1))
    assert engine._scheduler.budget.tokens == 512
    while engine.has_work:
        outputs += engine.step().finished
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH]
    assert tokens(finish(engine)) == expected


class TestLoss:
    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_process_that_dies_or_hangs_ends_the_engine(
        self,
        config: Callable[..., EngineConfig],
        load: Callable[..., ParallelModel],
        number: signal.Signals,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """In the middle of requests; nothing hangs, and every request is told.

        https://github.com/vllm-project/vllm/issues/6145
        """
        recorder = Recorder()
        model = load(patience_s=2.0)
        thread = EngineThread(model, config(), recorder)
        thread.start()
        for name in ("a", "b", "c"):
            endless = SamplingParams(max_tokens=10_000, temperature=0, ignore_eos=True)
            thread.submit(EngineRequest(name, endless, (5, 6, 7)))
        recorder.wait_tokens("a")
        os.kill(model.process_ids[0], number)
        outputs = recorder.wait_for("a", "b", "c")
        assert not thread.healthy
        assert {(output.finish_reason, output.error_code) for output in outputs} == {(FinishReason.ERROR, ENGINE_ERROR)}
        assert "the model's ranks are of no use any more" in str(outputs[0].error)
        told = f"rank 1 (process {model.process_ids[0]}) ended by signal 9"
        assert (told in str(thread.stats().failure)) is (number == signal.SIGKILL)
        [logged] = [record for record in caplog.records if record.exc_info]
        assert logged.exc_text is not None
        assert logged.exc_text.count("Traceback") == 1
        thread.stop()

    @pytest.mark.slow
    def test_an_engine_without_work_notices_too(
        self, config: Callable[..., EngineConfig], load: Callable[..., ParallelModel]
    ) -> None:
        model = load()
        thread = EngineThread(model, config(), Recorder())
        thread.start()
        os.kill(model.process_ids[0], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while thread.healthy and time.monotonic() < deadline:
            time.sleep(0.02)
        assert f"rank 1 (process {model.process_ids[0]}) ended by signal 9" in str(thread.stats().failure)
        thread.stop()

    @pytest.mark.slow
    def test_of_three_the_two_that_are_left_don_t_wait_for_each_other(
        self, config: Callable[..., EngineConfig], tmp_path: Path
    ) -> None:
        _, path = save_random_model(tmp_path, "Llama", intermediate_size=72, num_key_value_heads=3)
        with LLM(path, tmp_path, **CONFIG, tensor_parallel_size=3, patience_s=600) as llm:
            model = llm._engine._model
            assert isinstance(model, ParallelModel)
            threading.Timer(0.5, os.kill, (model.process_ids[0], signal.SIGKILL)).start()
            began_s = time.monotonic()
            endless = SamplingParams(max_tokens=240, ignore_eos=True)
            with pytest.raises(ModelFailed, match="of no use any more"):
                llm.generate([prompts()[4]] * 300, endless)
            assert time.monotonic() - began_s < 60
        assert gone(model.process_ids)

    @pytest.mark.slow
    def test_no_process_outlives_the_first(self, path: Path, tmp_path: Path) -> None:
        """Killed while its ranks work. https://github.com/vllm-project/vllm/issues/34643"""
        code = (
            "from engine import LLM, SamplingParams\n"
            f"llm = LLM({str(path)!r}, {str(tmp_path)!r}, tensor_parallel_size=2, **{CONFIG!r})\n"
            "print(*llm._engine._model.process_ids, flush=True)\n"
            "while True:\n"
            "    llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=50, ignore_eos=True))\n"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as first:
            assert first.stdout is not None
            process_ids = list(map(int, first.stdout.readline().split()))
            assert len(process_ids) == 1
            assert exists(process_ids[0])
            time.sleep(0.3)
            first.kill()
            first.wait()
            assert gone(process_ids)


class TestRefusals:
    """Before any process is started."""

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"tensor_parallel_size": 4}, "doesn't divide this model .6 attention heads.*these sizes divide it: 2$"),
            ({"device": "cuda:0"}, "names one device.*choose them by CUDA_VISIBLE_DEVICES"),
            ({"device": "cuda"}, "takes as many GPUs, and there are 0"),
            ({"quantization": "int8"}, "groups of 64, and on each of 2 devices the model's hidden size is 48"),
            ({"ops": {"silu": abs}}, "custom operations run on one device alone"),
        ],
    )
    def test_what_can_t_be_divided(
        self, config: Callable[..., EngineConfig], changes: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(ValueError, match=says):
            load_model(config(**changes))

    def test_more_sequences_than_one_of_the_gpus_computes_side_by_side(
        self, config: Callable[..., EngineConfig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4 - device.index)
        )
        with pytest.raises(ValueError, match=r"max_num_seqs is 13, and a GPU with 3 multiprocessors runs 12 at most"):
            load_model(config(device="cuda", max_num_seqs=13))

    def test_another_library_s_code(self, tmp_path: Path) -> None:
        _, path = save_random_model(tmp_path, "Olmo2")
        with pytest.raises(UnsupportedModel, match="transformers' code serves it on one device alone"):
            load_model(EngineConfig(str(path), tmp_path, tensor_parallel_size=2, device="cpu"))

    def test_the_fake_model(self) -> None:
        with pytest.raises(ValueError, match="runs on no device"):
            load_model(EngineConfig("fake", tensor_parallel_size=2))
