"""Keys and values in a byte each, as a setting of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.model import load_model
from engine.runner import TorchModel
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.engine.stepping import allocate, prompts, score

KINDS = ["int8", "fp8"]
MOST_DIFFERENCE = {"int8": 0.02, "fp8": 0.08}
"""Between two logprobs of a random model, in the mean."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, path = save_random_model(tmp_path_factory.mktemp("model"), "Qwen3")
    return path


def load(path: Path, cache: Path, **config: Any) -> TorchModel:
    model = load_model(EngineConfig(str(path), cache=cache, dtype="float32", device="cpu", **config))
    assert isinstance(model, TorchModel)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_as_small_as_they_can_be(saved: Path, tmp_path: Path, kind: str) -> None:
    model = load(saved, tmp_path, kv_cache_dtype=kind)
    layout = model.kv_layout(16)
    numbers = 2 * layout.layers * layout.kv_heads * layout.head_size
    assert layout.page_bytes == 16 * (numbers + numbers // layout.head_size * 4)
    assert model.info.kv_bytes_per_token == layout.page_bytes // 16


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_stay_close(saved: Path, tmp_path: Path, kind: str) -> None:
    tokens = (prompts()[5] * 3)[:100]

    def logprobs(model: TorchModel, chunk: int) -> torch.Tensor:
        allocate(model)
        found = torch.tensor([report.logprob for report in score(model, tokens, chunk)])
        model.close()
        return found

    exact = logprobs(load(saved, tmp_path, page_size=8), 32)
    lossy = logprobs(load(saved, tmp_path, kv_cache_dtype=kind), 32)
    again = logprobs(load(saved, tmp_path, kv_cache_dtype=kind), 7)
    assert 0 < (lossy - exact).abs().mean() < MOST_DIFFERENCE[kind]
    torch.testing.assert_close(again, lossy, rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_swapping_and_prefixes_change_nothing(saved: Path, tmp_path: Path, kind: str) -> None:
    """A page goes to the host and comes back with its scales, and is found by its content as any other."""
    shared = [3 + (7 * j) % 90 for j in range(40)]
    given = [shared + [5 + number] * 9 for number in range(4)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    config: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "kv_cache_dtype": kind, "max_seq_len": 96, "warm_up": False,
        "memory_margin": 0.0,
    }  # fmt: skip
    with LLM(saved, cache=tmp_path, max_num_seqs=1, enable_prefix_caching=False, **config) as llm:
        alone = [output.token_ids for output in llm.generate(given, params)]
    with LLM(saved, cache=tmp_path, **config) as llm:
        llm._engine._scheduler.running.preemption.compute_tokens_per_s = 1.0  # so that swapping always pays
        llm._engine._scheduler.pool.resize(12)
        outputs = llm.generate(given, params)
        assert llm._engine.stats().swaps > 0
        llm._engine.check()
    assert sum(output.metrics.cached_tokens for output in outputs) > 0
    assert [output.token_ids for output in outputs] == alone


def test_what_the_cpu_library_cant_keep_is_torchs_and_the_log_says_so(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(saved, tmp_path, kv_cache_dtype="fp8").close()
    assert "keeps keys and values in bfloat16 or float32, and kv_cache_dtype is fp8" in caplog.text
