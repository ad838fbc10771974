"""The GPU's model, on the host: launches, recorded steps by the host's recorder, staging, and memory that is short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.endurance.random_model import write_random_model
from engine.batch import Batch
from engine.compression import KVCompression
from engine.config import EngineConfig
from engine.decode_graphs import MOST_CONTEXT_TOKENS, RECORDING_BYTES, sizes_up_to
from engine.engine import Engine
from engine.gpu import GpuModel
from engine.launching import LaunchingModel, ThreadedModel
from engine.pipeline import Pipeline
from engine.recording import Held, HostRecorder, Recording, StaleRecording, Work
from engine.request import EngineRequest, FinishReason, SamplingParams
from engine.runner import TorchModel
from kernels.sampling import Sampled, SamplingBatch
from tests.unit.engine.model.random_adapters import save_random_adapter
from tests.unit.engine.model.random_models import save_random_model


class CountingRecorder:
    """Counts what is recorded and replayed, and raises at a recording if it is told."""

    def __init__(self, fails_at: int = 0, error: Exception | None = None) -> None:
        self.recorded = 0
        self.replayed = 0
        self._fails_at = fails_at
        self._error = error

    def record(self, work: Work, held: Held) -> Recording:
        self.recorded += 1
        if self.recorded == self._fails_at and self._error is not None:
            raise self._error
        recording = HostRecorder().record(work, held)
        replay = recording.replay

        def counted() -> None:
            self.replayed += 1
            replay()

        recording.replay = counted  # type: ignore[method-assign]
        return recording


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("random") / "model")


@pytest.fixture
def config(path: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    return {
        "model": str(path), "cache": tmp_path, "dtype": "float32", "device": "cpu", "max_seq_len": 128,
        "max_num_seqs": 6, "kv_cache_bytes": 2**23, "max_num_batched_tokens": 40, "warm_up": False,
    }  # fmt: skip


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 5},
    {"temperature": 0.7, "min_p": 0.05, "seed": 6},
    {"temperature": 0.0, "frequency_penalty": 1.0},
    {"temperature": 0.8, "logprobs": 2, "seed": 2},
    {"temperature": 0.0, "min_tokens": 8},
    {"temperature": 0.0, "prompt_logprobs": 0},
    {"temperature": 1.0, "logit_bias": {5: 3.0}, "seed": 4},
]


def answers(engine: Engine, requests: list[dict[str, Any]] = REQUESTS, output: int = 14) -> dict[str, tuple[Any, ...]]:
    for n, params in enumerate(requests):
        prompt = tuple(3 + i % (5 + n) for i in range(3 + 9 * (n % 5)))
        sampling = SamplingParams(**{"max_tokens": output + n, "ignore_eos": "min_tokens" not in params, **params})
        engine.add(EngineRequest(str(n), sampling, prompt))
    told: dict[str, tuple[Any, ...]] = {}
    while engine.has_work:
        for finished in engine.step().finished:
            assert finished.finish_reason is not FinishReason.ERROR, finished.error
            ranks = [one.rank for one in finished.logprobs or ()]
            told[finished.request_id] = (finished.token_ids, ranks, len(finished.prompt_logprobs or ()))
        engine.check()
    return told


def engine_of(model: Any, config: dict[str, Any], **changes: Any) -> Engine:
    return Engine(model, EngineConfig(**(config | changes)))


def test_it_launches_by_itself_and_overlaps_unless_told_otherwise(config: dict[str, Any]) -> None:
    model = GpuModel.load(EngineConfig(**config))
    assert isinstance(model, LaunchingModel)
    assert not isinstance(model, ThreadedModel)
    assert isinstance(engine_of(model, config)._steps, Pipeline)
    model.release_kv()
    assert not isinstance(engine_of(model, config, overlap=False)._steps, Pipeline)
    model.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_nothing_of_it_changes_a_token(config: dict[str, Any], *, overlap: bool, records: bool, caching: bool) -> None:
    config["enable_prefix_caching"] = caching
    plain = engine_of(TorchModel.load(EngineConfig(**config)), config)
    expected = answers(plain)
    plain.close()
    recorder = CountingRecorder()
    model = GpuModel.load(EngineConfig(**config), recorder=recorder if records else None)
    engine = engine_of(model, config, overlap=overlap)
    assert answers(engine) == expected
    assert (recorder.recorded, recorder.replayed > 10) == ((4, True) if records else (0, False))
    engine.close()


@pytest.mark.parametrize("pages", [9, 14])
def test_nor_do_requests_that_make_way(config: dict[str, Any], pages: int) -> None:
    model = GpuModel.load(EngineConfig(**config), recorder=HostRecorder())
    config["kv_cache_bytes"] = model.kv_layout(16).bytes_for(pages)
    greedy: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 1}] * 3
    engine = engine_of(model, config)
    got = answers(engine, greedy, output=30)
    assert engine.stats().preemptions > 0
    engine.close()
    plain = engine_of(TorchModel.load(EngineConfig(**config)), config)
    assert got == answers(plain, greedy, output=30)
    plain.close()


def test_batches_go_to_the_smallest_recording_that_has_room() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(6) == [1, 2, 4, 6]
    assert sizes_up_to(30) == [1, 2, 4, 8, 16, 24, 30]
    assert sizes_up_to(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def decode_batch(model: GpuModel, requests: int, context: int = 3, **changes: Any) -> Batch:
    ones, zeros = (1.0,) * requests, (0,) * requests
    sampling = SamplingBatch((0.0,) * requests, zeros, ones, (0.0,) * requests, zeros, zeros, ((),) * requests)
    given: dict[str, Any] = {
        "token_ids": [5] * requests, "positions": [context - 1] * requests,
        "slots": [16 * r + (context - 1) % 16 for r in range(requests)], "query_start": list(range(requests + 1)),
        "context_len": [context] * requests, "block_tables": [[r] * -(-context // 16) for r in range(requests)],
        "sample_rows": list(range(requests)), "sampling": sampling,
    }  # fmt: skip
    return Batch(**(given | changes))


@pytest.fixture
def recorded(config: dict[str, Any]) -> Iterator[GpuModel]:
    """With recordings of 1, 2, 4 and 6 requests."""
    model = GpuModel.load(EngineConfig(**config), recorder=HostRecorder())
    layout = model.kv_layout(16)
    model.allocate_kv(layout, layout.units_for(40), layout.units_for(40))
    model.record()
    yield model
    model.close()


def test_what_is_no_plain_decode_is_not_replayed(recorded: GpuModel) -> None:
    graphs = recorded._graphs
    assert graphs is not None
    sizes = [decode.size if (decode := graphs.fitting(decode_batch(recorded, n))) else None for n in range(1, 8)]
    assert sizes == [1, 2, 4, 4, 6, 6, None]
    chunk = {"token_ids": [5, 5], "positions": [1, 2], "slots": [1, 2], "query_start": [0, 2], "sample_rows": [1]}
    assert graphs.fitting(decode_batch(recorded, 1, **chunk)) is None
    assert graphs.fitting(decode_batch(recorded, 2, sample_rows=[1])) is None
    assert graphs.fitting(decode_batch(recorded, 1, pooled=[(0, 1)])) is None
    assert graphs.fitting(decode_batch(recorded, 1, context=129)) is None
    assert MOST_CONTEXT_TOKENS >= 128


def test_rows_that_are_padding_touch_no_page_and_no_other_row(recorded: GpuModel) -> None:
    storage, graphs = recorded._storage, recorded._graphs
    assert storage is not None
    assert graphs is not None
    for requests in range(1, 7):
        storage.bytes.zero_()
        batch = decode_batch(recorded, requests)
        replayed = recorded.execute(batch)
        pages = {n for n in range(41) if bool(storage._page(n).any())}
        assert pages - {storage.unused_page} == set(range(requests))
        recorded._graphs = None
        storage.bytes.zero_()
        assert recorded.execute(batch) == replayed
        recorded._graphs = graphs


def test_a_token_goes_from_one_step_to_the_next_on_the_device(recorded: GpuModel) -> None:
    """Through recordings of two sizes, and past them."""
    for graphs in (recorded._graphs, None):
        recorded._graphs = graphs
        first = recorded.launch(decode_batch(recorded, 3), None)
        unknown = decode_batch(recorded, 2, token_ids=[0, 9], context=4, carried=[(0, 2)])
        second = recorded.launch(unknown, first)
        known = decode_batch(recorded, 2, token_ids=[first.wait().tokens[2], 9], context=4)
        told = second.wait()
        assert recorded.execute(known) == told
        assert recorded.execute(decode_batch(recorded, 2, token_ids=[0, 9], context=4)) != told


def test_memory_that_was_replaced_under_a_recording_is_noticed(recorded: GpuModel) -> None:
    storage = recorded._storage
    assert storage is not None
    storage.bytes = storage.bytes.clone()
    with pytest.raises(StaleRecording):
        recorded.execute(decode_batch(recorded, 1))


def test_steps_are_recorded_again_after_a_sleep(config: dict[str, Any]) -> None:
    recorder = CountingRecorder()
    engine = engine_of(GpuModel.load(EngineConfig(**config), recorder=recorder), config)
    before = answers(engine)
    engine.sleep()
    engine.wake()
    assert recorder.recorded == 8
    assert answers(engine) == before
    engine.close()


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize("at", [1, 3])
def test_without_memory_for_recordings_steps_are_launched_one_by_one(
    config: dict[str, Any], at: int, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = CountingRecorder(at, OutOfMemoryError("CUDA"))
    model = GpuModel.load(EngineConfig(**config), recorder=recorder)
    promised = model.memory().used_bytes - TorchModel.memory(model).used_bytes
    assert promised > model.activation_bytes(6, 6)
    engine = engine_of(model, config)
    assert "no memory to record" in caplog.text
    assert len(answers(engine)) == len(REQUESTS)
    assert recorder.replayed == 0
    engine.close()


def test_another_fault_of_a_recording_is_no_want_of_memory(config: dict[str, Any]) -> None:
    recorder = CountingRecorder(2, RuntimeError("a kernel came to the host"))
    with pytest.raises(RuntimeError, match="came to the host"):
        engine_of(GpuModel.load(EngineConfig(**config), recorder=recorder), config)


@pytest.mark.parametrize("time", [2, 5, 9])
def test_a_launch_without_memory_is_made_in_parts(
    config: dict[str, Any], time: int, caplog: pytest.LogCaptureFixture
) -> None:
    class Tight(GpuModel):
        launches = 0

        def launch(self, batch: Batch, before: Any) -> Any:
            self.launches += 1
            if self.launches == time:
                raise OutOfMemoryError("CUDA")
            return super().launch(batch, before)

    expected = answers(engine_of(TorchModel.load(EngineConfig(**config)), config))
    engine = engine_of(Tight.load(EngineConfig(**config), recorder=HostRecorder()), config)
    assert answers(engine) == expected
    assert "memory is short for a step" in caplog.text
    engine.close()


def test_recordings_count_as_used_until_they_are_there(recorded: GpuModel) -> None:
    assert recorded._recordings_bytes() == 0
    recorded.release_kv()
    assert recorded._recordings_bytes() > recorded.activation_bytes(6, 6)


@pytest.mark.parametrize(("changes", "why"), [({"enforce_eager": True}, "enforce_eager"), ({}, "reference")])
def test_why_nothing_is_recorded(
    config: dict[str, Any], changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        model = GpuModel.load(EngineConfig(**(config | changes)))
    assert "no step is recorded" in caplog.text
    assert why in caplog.text
    model.close()


def test_an_answer_can_be_waited_for_twice(recorded: GpuModel) -> None:
    step = recorded.launch(decode_batch(recorded, 2), None)
    assert isinstance(step.wait(), Sampled)
    assert step.wait() == step.wait()
    assert torch.is_inference_mode_enabled() is False


@pytest.fixture
def adapted(tmp_path: Path) -> EngineConfig:
    """A model with two adapters."""
    base, path = save_random_model(tmp_path, "Llama")
    adapters = {"one": tmp_path / "one", "two": tmp_path / "two"}
    save_random_adapter(adapters["one"], base, rank=3, seed=2)
    save_random_adapter(adapters["two"], base, ("q_proj", "down_proj"), rank=5, seed=3)
    return EngineConfig(
        str(path), cache=tmp_path, dtype="float32", device="cpu", max_seq_len=128, max_num_seqs=6,
        kv_cache_bytes=2**23, warm_up=False, adapters=adapters,
    )  # fmt: skip


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_with_adapters_get_theirs_from_recorded_steps(adapted: EngineConfig, *, overlap: bool) -> None:
    """Beside others, among different ones, alone, and when only those without any are left."""
    recorder = CountingRecorder()
    said = []
    for model in (TorchModel.load(adapted), GpuModel.load(adapted, recorder=recorder)):
        engine = Engine(model, replace(adapted, overlap=overlap))
        for n, adapter in enumerate(("one", None, "two", "one", None)):
            params = SamplingParams(max_tokens=8 + 5 * n, temperature=0.0, ignore_eos=True)
            engine.add(EngineRequest(str(n), params, (5, 6, 7), adapter=adapter))
        outputs: dict[str, tuple[int, ...]] = {}
        steps = 0
        while engine.has_work:
            outputs.update({output.request_id: output.token_ids for output in engine.step().finished})
            engine.check()
            steps += 1
        engine.close()
        said.append(outputs)
    assert said[0] == said[1]
    assert len({tokens[:8] for tokens in said[0].values()}) == 3
    assert recorder.recorded == 8, "each size with and without adapters"
    assert recorder.replayed >= 26, "all steps but the prompts'"


def test_a_step_without_adapters_is_recorded_without_them(adapted: EngineConfig) -> None:
    model = GpuModel.load(adapted, recorder=HostRecorder())
    promised = model._recordings_bytes()
    layout = model.kv_layout(16)
    model.allocate_kv(layout, layout.units_for(40), layout.units_for(40))
    model.record()
    graphs = model._graphs
    assert graphs is not None
    plain, mixed = (graphs.fitting(decode_batch(model, 3, **given)) for given in ({}, {"adapters": [0, 2, 0]}))
    assert plain is not None
    assert mixed is not None
    assert (plain.size, mixed.size) == (4, 4)
    assert (plain.tensors.adapted is None, mixed.tensors.adapted is None) == (True, False)
    assert promised > 2 * 4 * RECORDING_BYTES
    model.close()


def test_thinned_requests_are_replayed_too(config: dict[str, Any]) -> None:
    config |= {"kv_compression": KVCompression(ratio=0.5, window_tokens=16), "max_num_batched_tokens": 64}
    requests: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 1}] * 2
    plain = engine_of(TorchModel.load(EngineConfig(**config)), config)
    expected = answers(plain, requests, output=60)
    plain.close()
    recorder = CountingRecorder()
    engine = engine_of(GpuModel.load(EngineConfig(**config), recorder=recorder), config)
    assert answers(engine, requests, output=60) == expected
    assert recorder.replayed > 30
    engine.close()
