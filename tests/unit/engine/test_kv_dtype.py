"""Keys and values in a byte each, as a setting of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.batch import Model
from engine.cpu.model import CpuModel
from engine.model import load_model
from engine.runner import TorchModel
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.engine.stepping import allocate, prompts, score
from tests.unit.kernels.isas import needs_library

KINDS = ["int8", "fp8"]
MOST_DIFFERENCE = {"int8": 0.02, "fp8": 0.08}
"""Between two logprobs of a random model, in the mean."""
PAGE_SIZES = [pytest.param(16, marks=needs_library, id="library"), pytest.param(8, id="torch")]
"""The library serves pages of 16 tokens, torch those of 8."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, path = save_random_model(tmp_path_factory.mktemp("model"), "Qwen3")
    return path


def load(path: Path, cache: Path, page_size: int, **config: Any) -> Model:
    model = load_model(
        EngineConfig(str(path), cache=cache, device="cpu", page_size=page_size, **{"dtype": "float32"} | config)
    )
    assert isinstance(model, CpuModel if page_size == 16 else TorchModel)
    return model


def logprobs(model: Model, chunk: int) -> torch.Tensor:
    """Of each token of a text, computed in chunks."""
    tokens = (prompts()[5] * 3)[:100]
    allocate(model)
    found = torch.tensor([report.logprob for report in score(model, tokens, chunk)])
    model.close()
    return found


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_as_small_as_they_can_be(saved: Path, tmp_path: Path, kind: str, dtype: str, page_size: int) -> None:
    model = load(saved, tmp_path, page_size, kv_cache_dtype=kind, dtype=dtype)
    layout = model.kv_layout(16)
    numbers = 2 * layout.layers * layout.kv_heads * layout.head_size
    assert layout.page_bytes == 16 * (numbers + numbers // layout.head_size * 4)
    assert model.info.kv_bytes_per_token == layout.page_bytes // 16
    model.close()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_stay_close(saved: Path, tmp_path: Path, kind: str, page_size: int) -> None:
    exact = logprobs(load(saved, tmp_path, page_size), 32)
    lossy = logprobs(load(saved, tmp_path, page_size, kv_cache_dtype=kind), 32)
    again = logprobs(load(saved, tmp_path, page_size, kv_cache_dtype=kind), 7)
    assert 0 < (lossy - exact).abs().mean() < MOST_DIFFERENCE[kind]
    torch.testing.assert_close(again, lossy, rtol=0, atol=0 if page_size == 16 else 0.05)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_and_torch_lose_the_same(saved: Path, tmp_path: Path, kind: str) -> None:
    """Their sums differ in the last bits, so now and then a number is rounded to the next step."""
    library, reference = (logprobs(load(saved, tmp_path, size, kv_cache_dtype=kind), 32) for size in (16, 8))
    exact = logprobs(load(saved, tmp_path, 16), 32)
    assert (library - reference).abs().mean() < 0.1 * (library - exact).abs().mean()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_swapping_and_prefixes_change_nothing(saved: Path, tmp_path: Path, kind: str, page_size: int) -> None:
    """A page goes to the host and comes back with its scales, and is found by its content as any other."""
    shared = [3 + (7 * j) % 90 for j in range(40)]
    given = [shared + [5 + number] * 9 for number in range(4)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    config: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "kv_cache_dtype": kind, "max_seq_len": 96, "warm_up": False,
        "memory_margin": 0.0, "page_size": page_size,
    }  # fmt: skip
    with LLM(saved, cache=tmp_path, max_num_seqs=1, enable_prefix_caching=False, **config) as llm:
        alone = [output.token_ids for output in llm.generate(given, params)]
    with LLM(saved, cache=tmp_path, **config) as llm:
        llm._engine._scheduler.running.preemption.copy_bytes_per_s = 1e18  # so that swapping always pays
        llm._engine._scheduler.pool.resize(160 // page_size)
        outputs = llm.generate(given, params)
        assert llm._engine.stats().swaps > 0
        llm._engine.check()
    assert sum(output.metrics.cached_tokens for output in outputs) > 0
    assert [output.token_ids for output in outputs] == alone


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_pages_move_together_and_outlast_a_sleep(saved: Path, tmp_path: Path, kind: str) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    given = [[3 + (7 * j + number) % 90 for j in range(40 + 9 * number)] for number in range(5)]
    config: dict[str, Any] = {"device": "cpu", "kv_cache_dtype": kind, "max_seq_len": 128, "kv_cache_bytes": 2**24}
    with LLM(saved, cache=tmp_path, quantization="int8", **config) as llm:
        before = [output.token_ids for output in llm.generate(given, params)]
        llm._engine.set_kv_bytes(2**23)
        assert [output.token_ids for output in llm.generate(given, params)] == before
        llm.sleep()
        llm.wake()
        assert [output.token_ids for output in llm.generate(given, params)] == before
        llm._engine.check()
