"""A row's result is the same bits in any company: whatever the chunks, the batch, the threads and the pages.

https://github.com/vllm-project/vllm/issues/5952
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.cpu.model import CpuModel
from tests.unit.engine.model.random_adapters import LINEAR, save_random_adapter
from tests.unit.engine.model.random_models import VOCAB, save_random_model
from tests.unit.engine.stepping import Run, allocate, finish, prompts, score
from tests.unit.kernels.isas import needs_library

pytestmark = needs_library

FORMS = [
    pytest.param({"dtype": "float32"}, id="float32"),
    pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
    pytest.param({"dtype": "bfloat16", "quantization": "int8"}, id="int8"),
    pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, id="int8 KV"),
    pytest.param({"dtype": "float32", "kv_cache_dtype": "fp8"}, id="fp8 KV"),
]
LENGTH = 300


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, path = save_random_model(tmp_path_factory.mktemp("model"), "Llama", hidden_size=72, intermediate_size=100)
    return path


def load(saved: Path, tmp_path: Path, **config: Any) -> CpuModel:
    model = CpuModel.load(EngineConfig(str(saved), cache=tmp_path, **config))
    allocate(model)
    return model


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    form: dict[str, Any] = request.param
    return form


@pytest.fixture
def model(saved: Path, tmp_path: Path, form: dict[str, Any]) -> Iterator[CpuModel]:
    model = load(saved, tmp_path, threads=2, **form)
    yield model
    model.close()


@pytest.fixture
def tokens() -> list[int]:
    return torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(6)).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16, 17])
def test_chunks_change_no_bit(model: CpuModel, tokens: list[int], chunk: int) -> None:
    assert score(model, tokens, chunk) == score(model, tokens, LENGTH)


def test_threads_change_no_bit(saved: Path, tmp_path: Path, form: dict[str, Any], tokens: list[int]) -> None:
    told = []
    for threads in (1, 2, 5):
        model = load(saved, tmp_path, threads=threads, **form)
        told.append(score(model, tokens, 64))
        model.close()
    assert told[0] == told[1] == told[2]


def test_neighbours_change_no_token(model: CpuModel) -> None:
    """Greedy and sampled requests, alone and beside one another, in chunks of their own."""

    def run(i: int) -> Run:
        return Run(prompts()[i % 6], temperature=0.9 * (i % 2), seed=i)

    together = finish(model, [run(i) for i in range(18)], 10, 16)
    assert [finish(model, [run(i)], 10, 7)[0] for i in range(18)] == together


@pytest.mark.parametrize("threads", [2, 3])
def test_a_crowd_that_threads_divide_changes_no_token(
    saved: Path, tmp_path: Path, form: dict[str, Any], threads: int
) -> None:
    """With so many rows each thread takes its own requests through all layers."""

    def run(i: int) -> Run:
        return Run(prompts()[i % 4], temperature=0.9 * (i % 2), seed=i)

    crowd = load(saved, tmp_path, threads=threads, **form)
    together = finish(crowd, [run(i) for i in range(100)], 6, 16)
    crowd.close()
    alone = load(saved, tmp_path, threads=1, **form)
    assert [finish(alone, [run(i)], 6, 16)[0] for i in range(100)] == together
    alone.close()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, saved: Path) -> dict[str, Path]:
    """Of all matrices, and of some; of different ranks."""
    base, _ = save_random_model(tmp_path_factory.mktemp("again"), "Llama", hidden_size=72, intermediate_size=100)
    parent = tmp_path_factory.mktemp("adapters")
    save_random_adapter(parent / "all", base, LINEAR, rank=5)
    save_random_adapter(parent / "some", base, ("v_proj", "gate_proj"), rank=11, seed=1)
    return {"all": parent / "all", "some": parent / "some"}


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_adapters_of_neighbours_change_no_token(
    saved: Path, tmp_path: Path, form: dict[str, Any], adapters: dict[str, Path], threads: int
) -> None:
    """Few rows, many, and so many that threads divide them: with each adapter and without one."""

    def run(i: int) -> Run:
        return Run(prompts()[i % 4], temperature=0.9 * (i % 2), seed=i, adapter=i % 3)

    crowd = load(saved, tmp_path, threads=threads, adapters=adapters, **form)
    alone = [finish(crowd, [run(i)], 6, 7)[0] for i in range(12)]
    for count in (3, 12, 100):
        together = finish(crowd, [run(i) for i in range(count)], 6, 16)
        assert together[:12] == alone[:count]
    crowd.close()
    plain = load(saved, tmp_path, threads=threads, **form)
    assert [finish(plain, [run(i)], 6, 7)[0] for i in range(0, 12, 3)] == alone[::3]
    plain.close()


def test_a_request_has_the_same_logprobs_beside_others_with_adapters(
    saved: Path, tmp_path: Path, form: dict[str, Any], adapters: dict[str, Path]
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
    names = [None, "all", "some"]
    told = {}
    for label, config in (("plain", {}), ("adapted", {"adapters": adapters})):
        with LLM(saved, cache=tmp_path, threads=2, device="cpu", enable_prefix_caching=False, **config, **form) as llm:
            told[label] = llm.generate(prompts()[:5], params)
            if config:
                mixed = llm.generate(prompts()[:5] * 3, params, adapter=[name for name in names for _ in range(5)])
    assert [output.logprobs for output in mixed[:5]] == [output.logprobs for output in told["plain"]]
    assert [output.logprobs for output in told["adapted"]] == [output.logprobs for output in told["plain"]]
    assert mixed[5].logprobs != mixed[0].logprobs != mixed[10].logprobs
