"""Logits that are no numbers: the request that has them fails by name, however it asks, and nobody else notices."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch, Model
from engine.config import EngineConfig
from engine.cpu.model import CpuModel
from engine.engine import Engine
from engine.executor import ModelFailed
from engine.fake import FakeModel
from engine.gpu import GpuModel
from engine.recording import HostRecorder
from engine.request import EngineRequest, FinishReason, RequestOutput, SamplingParams
from engine.runner import TorchModel
from kernels.sampling import NO_TOKEN, Sampled
from tests.unit.engine.bench import expected, make_bench
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.kernels.isas import needs_library

NO_NUMBERS = "NoNumbers: the model's logits are no numbers"


class Overflowing(FakeModel):
    """Has no token for requests that begin with an x and know `sound` tokens or more."""

    def __init__(self, sound: int = 1) -> None:
        super().__init__()
        self.sound = sound

    def execute(self, batch: Batch) -> Sampled:
        told = super().execute(batch)
        tokens = list(told.tokens)
        for sampled, at in enumerate(batch.sample_rows):
            known = batch.known_tokens[bisect_right(batch.query_start, at) - 1]
            if known[0] == ord("x") and batch.positions[at] + 1 >= self.sound:
                tokens[sampled] = NO_TOKEN
        return told._replace(tokens=tokens)


@pytest.mark.parametrize("sound", [1, 5, 9])
def test_the_request_that_has_them_fails_alone_and_keeps_what_it_had(sound: int) -> None:
    bench = make_bench(Overflowing(sound))
    for number in range(5):
        bench.add(str(number), "xyz" if number == 2 else "abc", max_tokens=12)
    outputs = bench.run()
    failed = outputs.pop("2")
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, NO_NUMBERS)
    assert failed.token_ids == expected("xyz", 12)[: max(0, sound - 3)]
    assert [output.token_ids for output in outputs.values()] == [expected("abc", 12)] * 4


def test_one_of_several_completions_fails_the_request() -> None:
    output = make_bench(Overflowing()).one("xyz", n=3)
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, NO_NUMBERS)


def test_a_model_that_has_no_others_is_given_up() -> None:
    class Ruined(FakeModel):
        def execute(self, batch: Batch) -> Sampled:
            return Sampled([NO_TOKEN] * len(batch.sample_rows))

    bench = make_bench(Ruined())
    bench.add("a", "abc")
    with pytest.raises(ModelFailed, match="no numbers"):
        bench.run()


def test_a_vector_of_them_is_none() -> None:
    class Overflowing(FakeModel):
        def execute(self, batch: Batch) -> Sampled:
            told = super().execute(batch)
            sums = [one + (np.nan if batch.token_ids[first] == ord("x") else 0)
                    for (first, _), one in zip(batch.pooled, told.pooled or (), strict=True)]  # fmt: skip
            return told._replace(pooled=sums)

    bench = make_bench(Overflowing())
    for name in ("xyz", "abc"):
        bench.engine.add(EngineRequest(name, SamplingParams(max_tokens=0), name, embeds=True))
    outputs = bench.run()
    assert (outputs["xyz"].error, outputs["xyz"].embedding) == (NO_NUMBERS, None)
    assert outputs["abc"].embedding is not None


POISON = 50
"""A token whose embedding is no number."""
SOUND = tuple(range(3, 40))
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.9, "seed": 6, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "min_tokens": 5},
]
MODELS = {
    "library": (CpuModel.load, {}),
    "library in int8": (CpuModel.load, {"dtype": "bfloat16", "quantization": "int8"}),
    "torch": (TorchModel.load, {}),
    "overlapped": (TorchModel.load, {"overlap": True}),
    "launched": (GpuModel.load, {}),
    "recorded": (lambda config: GpuModel.load(config, recorder=HostRecorder()), {}),
}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference, path = save_random_model(tmp_path_factory.mktemp("model"), "Llama")
    with torch.no_grad():
        reference.model.embed_tokens.weight[POISON] = torch.nan
    reference.save_pretrained(path)
    return path


def answers(engine: Engine, prompts: dict[str, tuple[int, ...]]) -> dict[str, RequestOutput]:
    """Of each prompt in each way; names are those of the prompts, and the ways' numbers."""
    for name, prompt in prompts.items():
        for number, way in enumerate(WAYS):
            params = SamplingParams(max_tokens=8, ignore_eos="min_tokens" not in way, **way)
            engine.add(EngineRequest(f"{name} {number}", params, prompt))
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step().finished}
        engine.check()
    return outputs


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_library if "library" in kind else ()) for kind in MODELS]
)
def test_real_logits_that_are_none(poisoned: Path, tmp_path: Path, kind: str) -> None:
    """Pages that they have written are used again: what is left there harms nobody either."""
    load, changes = MODELS[kind]
    settings: dict[str, Any] = {
        "cache": tmp_path, "dtype": "float32", "device": "cpu", "max_seq_len": 64, "kv_cache_bytes": 2**22,
        "enable_prefix_caching": False, **changes,
    }  # fmt: skip
    config = EngineConfig(str(poisoned), **settings)
    model: Model = load(config)
    engine = Engine(model, config)
    alone = answers(engine, {"sound": SOUND})
    assert {output.error for output in alone.values()} == {None}
    for _ in range(2):
        both = answers(engine, {"early": (5, POISON, *SOUND), "sound": SOUND, "last": (*SOUND[:20], POISON)})
        for name, output in both.items():
            if name.startswith("sound"):
                assert output.token_ids == alone[name].token_ids
            else:
                assert (output.error, output.token_ids) == (NO_NUMBERS, ())
    engine.close()


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", [pytest.param("library", marks=needs_library), "torch", "overlapped"])
def test_a_beginning_that_was_computed_beside_them_is_computed_again(poisoned: Path, tmp_path: Path, kind: str) -> None:
    """A row reads what stands behind it with the weight 0, and 0 times NaN is NaN."""
    load, changes = MODELS[kind]
    settings: dict[str, Any] = {
        "cache": tmp_path, "dtype": "float32", "device": "cpu", "max_seq_len": 256, "kv_cache_bytes": 2**22,
        "max_num_batched_tokens": 40, **changes,
    }  # fmt: skip
    config = EngineConfig(str(poisoned), **settings)
    engine = Engine(load(config), config)
    alone = answers(engine, {"sound": SOUND})
    engine.sleep()
    engine.wake()
    assert engine._scheduler.pool.cached == 0
    answers(engine, {"bad": (*SOUND[:34], POISON, *SOUND)})
    before = engine.stats().cached_tokens
    both = answers(engine, {"sound": SOUND})
    assert engine.stats().cached_tokens > before, "the others share it again"
    assert {name: output.token_ids for name, output in both.items()} == {
        name: output.token_ids for name, output in alone.items()
    }
    engine.close()
