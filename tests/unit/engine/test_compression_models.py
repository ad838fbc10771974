"""Thinned requests of models with weights: the same output however they are computed, and where it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, EngineConfig, KVCompression, SamplingParams
from engine.model import load_model
from engine.request import EngineRequest, Progress
from tests.unit.engine.model.random_models import save_random_model

THIRD = KVCompression(0.3, sink_tokens=2, window_tokens=32)
PARAMS = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
PROMPTS = [[3 + (7 * i + j * j + 5 * j) % 90 for j in range(30 + 23 * i)] for i in range(5)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, path = save_random_model(tmp_path_factory.mktemp("model"), "Qwen3")
    return path


def small(saved: Path, cache: Path, page_size: int, **config: Any) -> LLM:
    """The library serves pages of 16 tokens, torch those of 8."""
    given: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "page_size": page_size, "max_seq_len": 256, "kv_compression": THIRD,
        "memory_margin": 0.0, "warm_up": False,
    } | config  # fmt: skip
    return LLM(saved, cache=cache, **given)


@pytest.fixture(scope="module", params=[16, 8], ids=["library", "torch"])
def alone(request: pytest.FixtureRequest, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The page size, and the output of each prompt with the engine for itself."""
    with small(saved, tmp_path_factory.mktemp("cache"), request.param, max_num_seqs=1) as llm:
        return request.param, [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_something_is_lost(alone: Any, saved: Path, tmp_path: Path) -> None:
    page_size, thinned = alone
    with small(saved, tmp_path, page_size, kv_compression=KVCompression()) as llm:
        whole = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    assert whole[-1] != thinned[-1]


@pytest.mark.parametrize("budget", [1024, 24], ids=["whole steps", "small chunks"])
def test_neighbours_and_chunks_change_nothing(alone: Any, saved: Path, tmp_path: Path, budget: int) -> None:
    page_size, expected = alone
    with small(saved, tmp_path, page_size, max_num_batched_tokens=budget) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        llm._engine.check()
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("swap_space_bytes", [0, 2**26], ids=["computed again", "swapped"])
def test_who_makes_way_comes_back_with_what_it_had(
    alone: Any, saved: Path, tmp_path: Path, swap_space_bytes: int
) -> None:
    page_size, expected = alone
    with small(saved, tmp_path, page_size, swap_space_bytes=swap_space_bytes) as llm:
        engine = llm._engine
        engine._scheduler.running.preemption.compute_tokens_per_s = 1.0  # so that swapping always pays
        for number, prompt in enumerate(PROMPTS):
            engine.add(EngineRequest(str(number), PARAMS, tuple(prompt)))
        outputs = {}
        steps = 0
        while engine.has_work:
            outputs |= {output.request_id: output.token_ids for output in engine.step().finished}
            steps += 1
            if steps in (9, 30):
                assert len(engine._scheduler.make_room(0, 0.0)) == len(PROMPTS)
        assert engine.stats().swaps == (2 * len(PROMPTS) if swap_space_bytes else 0)
    assert [outputs[str(number)] for number in range(len(PROMPTS))] == expected


def test_a_request_goes_on_elsewhere_from_its_tokens(alone: Any, saved: Path, tmp_path: Path) -> None:
    """A job of a worker that died: its prompt and its tokens are computed again, and thinned where they were."""
    page_size, expected = alone
    with small(saved, tmp_path, page_size) as llm:
        for number, prompt in enumerate(PROMPTS):
            had = Progress(expected[number][:33])
            llm._engine.add(EngineRequest(str(number), PARAMS, tuple(prompt), progress=(had,)))
        outputs = {}
        while llm._engine.has_work:
            outputs |= {output.request_id: output.token_ids for output in llm._engine.step().finished}
    assert [outputs[str(number)] for number in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("page_size", [16, 8], ids=["library", "torch"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_bytes_are_thinned_too(saved: Path, tmp_path: Path, kind: str, page_size: int) -> None:
    with small(saved, tmp_path, page_size, kv_cache_dtype=kind) as llm:
        together = [output.token_ids for output in llm.generate(PROMPTS[-2:], PARAMS)]
        single = [llm.generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS[-2:]]
    assert together == single


@pytest.mark.parametrize(("family", "config"), [("Mistral", {"sliding_window": 20}), ("Qwen3", {})])
def test_windows_and_thinning_exclude_each_other(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    _, path = save_random_model(tmp_path, family, **config)
    asked = {} if config else {"sliding_window": 20}
    with pytest.raises(ValueError, match=r"has some that see 20 tokens: set kv_compression\.ratio to 1") as raised:
        load_model(EngineConfig(str(path), cache=tmp_path, device="cpu", kv_compression=THIRD, **asked))
    assert str(raised.value).endswith(", or leave sliding_window out") == bool(asked)
