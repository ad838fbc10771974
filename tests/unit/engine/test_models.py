"""Every implementation of `Model` with real weights, stepped by hand: mixed batches give what single requests give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Model
from engine.config import EngineConfig
from engine.cpu.model import CpuModel
from engine.runner import TorchModel
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.engine.stepping import PAGES, Run, allocate, finish, prompts, score, step
from tests.unit.kernels.isas import needs_library

Kind = type[TorchModel] | type[CpuModel]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return save_random_model(tmp_path_factory.mktemp("model"), "Qwen3")


@pytest.fixture(params=[TorchModel, pytest.param(CpuModel, marks=needs_library)])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


def load(kind: Kind, saved: tuple[Any, Path], tmp_path: Path, **config: Any) -> Model:
    return kind.load(EngineConfig(str(saved[1]), cache=tmp_path, **({"dtype": "float32"} | config)))


@pytest.fixture
def model(kind: Kind, saved: tuple[Any, Path], tmp_path: Path) -> Iterator[Model]:
    model = load(kind, saved, tmp_path)
    allocate(model)
    yield model
    model.close()


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_greedy_tokens_equal_those_of_transformers(saved: tuple[Any, Path], model: Model, chunk: int) -> None:
    expected = []
    for prompt in prompts():
        with torch.inference_mode():
            whole = saved[0].generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, min_new_tokens=12,
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        expected.append(whole[0, len(prompt) :].tolist())
    assert finish(model, [Run(prompt) for prompt in prompts()], 12, chunk) == expected


def test_a_seeded_request_is_the_same_alone_and_in_a_batch(model: Model) -> None:
    def run(i: int) -> Run:
        return Run(prompts()[i], temperature=0.8, seed=100 + i)

    together = finish(model, [run(i) for i in range(6)], 8, 16)
    assert [finish(model, [run(i)], 8, 16)[0] for i in range(6)] == together
    assert len({tuple(output) for output in together}) == 6


def test_a_step_that_ends_no_prompt_samples_nothing(model: Model) -> None:
    run = Run(prompts()[5])
    step(model, [(run, 10)], list(range(PAGES)))
    assert (run.computed, len(run.tokens)) == (10, 40)


def test_a_scored_prompt_passes_the_head_in_parts(kind: Kind, saved: tuple[Any, Path], tmp_path: Path) -> None:
    """However many rows stand side by side, each gets the same logprobs."""
    tokens = 4 * prompts()[5]
    told = []
    for most, chunk in ((64, 160), (1, 160), (64, 33)):
        model = load(kind, saved, tmp_path, max_num_seqs=most)
        allocate(model)
        told.append(score(model, tokens, chunk))
        model.close()
    for others in told[1:]:
        for one, other in zip(told[0], others, strict=True):
            assert (one.token, one.rank) == (other.token, other.rank)
            assert [i for i, _ in one.top] == [i for i, _ in other.top]
            assert one.logprob == pytest.approx(other.logprob, abs=0 if kind is CpuModel else 1e-5)


def test_rows_behind_the_vocabulary_are_never_chosen(kind: Kind, tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/13175"""
    reference, path = save_random_model(tmp_path, "Llama", vocab_size=128)
    with torch.no_grad():
        reference.lm_head.weight[96:] *= 100
    reference.save_pretrained(path)
    model = load(kind, (reference, path), tmp_path)
    assert model.info.vocab_size == 96
    allocate(model)
    outputs = finish(model, [Run(prompt) for prompt in prompts()], 8, 64)
    assert max(max(output) for output in outputs) < 96


def test_info_describes_the_model(model: Model) -> None:
    info = model.info
    assert (info.device, info.context_len, info.vocab_size) == ("cpu", 512, 96)
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert info.text.eos_token_ids == (2,)


class TestOrder:
    def test_kv_comes_before_the_first_step(self, kind: Kind, saved: tuple[Any, Path], tmp_path: Path) -> None:
        model = load(kind, saved, tmp_path)
        with pytest.raises(RuntimeError, match="allocate_kv must be called"):
            step(model, [(Run([5]), 1)], [0])
        allocate(model)
        with pytest.raises(RuntimeError, match="allocated already"):
            allocate(model)

    def test_nothing_runs_after_close(self, model: Model) -> None:
        model.close()
        model.close()
        with pytest.raises(RuntimeError, match="closed"):
            step(model, [(Run([5]), 1)], [0])


class TestSleep:
    def test_the_same_weights_come_back(self, model: Model) -> None:
        before = finish(model, [Run(prompt) for prompt in prompts()], 8, 64)
        model.release_kv()
        model.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            step(model, [(Run([5]), 1)], [0])
        model.wake()
        allocate(model)
        assert finish(model, [Run(prompt) for prompt in prompts()], 8, 64) == before

    def test_files_of_another_model_are_refused(self, kind: Kind, tmp_path: Path) -> None:
        reference, path = save_random_model(tmp_path / "model", "Llama")
        model = load(kind, (reference, path), tmp_path)
        model.sleep()
        with torch.no_grad():
            reference.model.norm.weight += 1
        reference.save_pretrained(path)
        with pytest.raises(RuntimeError, match="another model now"):
            model.wake()


class TestMemory:
    def test_a_step_stays_within_what_the_structure_tells(self, kind: Kind, tmp_path: Path) -> None:
        saved = save_random_model(tmp_path, "Llama", hidden_size=256, intermediate_size=1024, num_attention_heads=8)
        model = load(kind, saved, tmp_path)
        allocate(model)
        run = Run([5] * 400)
        step(model, [(run, 400)], list(range(PAGES)))
        before = model.memory().used_bytes
        model.take_peak_bytes()
        run.computed = 0
        del run.tokens[400:]
        step(model, [(run, 400)], list(range(PAGES)))
        assert model.take_peak_bytes() - before <= model.activation_bytes(400, 1) + 2**20

    def test_the_default_is_a_gibibyte_on_the_cpu(self, model: Model) -> None:
        assert model.default_kv_bytes == 2**30
        memory = model.memory()
        assert 0 < memory.used_bytes < memory.total_bytes


def test_a_window_that_is_asked_for_is_that_of_a_model_with_one(kind: Kind, tmp_path: Path) -> None:
    """Weights of the same random numbers: the setting makes a Mistral of a Llama."""
    narrow, path = save_random_model(tmp_path / "narrow", "Mistral", sliding_window=9)
    narrow.config.sliding_window = None
    narrow.save_pretrained(path)
    _, own = save_random_model(tmp_path / "own", "Mistral", sliding_window=9)
    outputs = []
    for directory, asked in ((path, None), (path, 9), (own, None), (own, 100)):
        model = load(kind, (narrow, directory), tmp_path, sliding_window=asked)
        assert model.info.context_len == 512
        allocate(model)
        outputs.append(finish(model, [Run(prompt) for prompt in prompts()], 12, 7))
        model.close()
    assert outputs[0] != outputs[1] == outputs[2] == outputs[3]
