"""The model on its device, stepped by hand: mixed batches give what single requests give."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.runner import TorchModel, choose_device, choose_dtype
from kernels.sampling import SamplingBatch
from tests.unit.engine.model.random_models import save_random_model

PAGE_SIZE = 4
PAGES = 200


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return save_random_model(tmp_path_factory.mktemp("model"), "Qwen3")


def load(saved: tuple[Any, Path], tmp_path: Path, **config: Any) -> TorchModel:
    return TorchModel.load(EngineConfig(str(saved[1]), cache=tmp_path, **({"dtype": "float32"} | config)))


def allocate(model: TorchModel) -> None:
    layout = model.kv_layout(PAGE_SIZE)
    units = layout.units_for(PAGES)
    model.allocate_kv(layout, units, units)


@pytest.fixture
def model(saved: tuple[Any, Path], tmp_path: Path) -> Iterator[TorchModel]:
    model = load(saved, tmp_path)
    allocate(model)
    yield model
    model.close()


@dataclass
class Run:
    """One request as a scheduler would see it."""

    tokens: list[int]
    temperature: float = 0.0
    seed: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)


def step(model: TorchModel, work: list[tuple[Run, int]], free: list[int]) -> None:
    """Compute the next n tokens of each run; runs that reach their end get a token."""
    token_ids, positions, slots, starts, ends = [], [], [], [0], []
    for run, n in work:
        end = run.computed + n
        while len(run.pages) * PAGE_SIZE < end:
            run.pages.append(free.pop())
        token_ids += run.tokens[run.computed : end]
        positions += range(run.computed, end)
        slots += [run.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(run.computed, end)]
        starts.append(len(token_ids))
        ends.append(end)
    sampled = [i for i, (run, _) in enumerate(work) if ends[i] == len(run.tokens)]
    runs = [work[i][0] for i in sampled]
    ones = (1.0,) * len(runs)
    batch = Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_start=starts,
        context_len=ends,
        block_tables=[run.pages for run, _ in work],
        sample_rows=[starts[i + 1] - 1 for i in sampled],
        sampling=SamplingBatch(
            temperature=tuple(run.temperature for run in runs),
            top_k=(0,) * len(runs),
            top_p=ones,
            min_p=(0.0,) * len(runs),
            seed=tuple(run.seed for run in runs),
            position=tuple(len(run.tokens) for run in runs),
            banned=((),) * len(runs),
        ),
    )
    chosen = model.execute(batch).tokens
    assert len(chosen) == len(runs)
    for (run, n), end in zip(work, ends, strict=True):
        run.computed = end
        assert n > 0
    for run, token in zip(runs, chosen, strict=True):
        run.tokens.append(token)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (1, 3, 4, 5, 17, 40)]


def finish(model: TorchModel, runs: list[Run], new_tokens: int, chunk: int) -> list[list[int]]:
    """All runs side by side, prompts in chunks; the outputs."""
    free = list(range(PAGES))
    lengths = [len(run.tokens) for run in runs]
    while work := [
        (run, min(chunk, len(run.tokens) - run.computed))
        for run, length in zip(runs, lengths, strict=True)
        if len(run.tokens) < length + new_tokens
    ]:
        step(model, work, free)
    return [run.tokens[length:] for run, length in zip(runs, lengths, strict=True)]


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_greedy_tokens_equal_those_of_transformers(saved: tuple[Any, Path], model: TorchModel, chunk: int) -> None:
    expected = []
    for prompt in prompts():
        with torch.inference_mode():
            whole = saved[0].generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, min_new_tokens=12,
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        expected.append(whole[0, len(prompt) :].tolist())
    assert finish(model, [Run(prompt) for prompt in prompts()], 12, chunk) == expected


def test_a_seeded_request_is_the_same_alone_and_in_a_batch(model: TorchModel) -> None:
    def run(i: int) -> Run:
        return Run(prompts()[i], temperature=0.8, seed=100 + i)

    together = finish(model, [run(i) for i in range(6)], 8, 16)
    assert [finish(model, [run(i)], 8, 16)[0] for i in range(6)] == together
    assert len({tuple(output) for output in together}) == 6


def test_a_step_that_ends_no_prompt_samples_nothing(model: TorchModel) -> None:
    run = Run(prompts()[5])
    step(model, [(run, 10)], list(range(PAGES)))
    assert (run.computed, len(run.tokens)) == (10, 40)


def test_a_scored_prompt_passes_the_head_in_parts(saved: tuple[Any, Path], tmp_path: Path) -> None:
    """As many rows at once as the memory budget counts with, and the same logprobs."""
    tokens = prompts()[5]
    rows = len(tokens) - 1
    zeros = (0,) * rows
    sampling = SamplingBatch(
        zeros, zeros, (1.0,) * rows, zeros, zeros, tuple(range(1, rows + 1)), ((),) * rows,
        forced=tuple(tokens[1:]), logprobs=(4,) * rows,
    )  # fmt: skip
    batch = Batch(
        token_ids=tokens, positions=list(range(rows + 1)), slots=list(range(rows + 1)), query_start=[0, rows + 1],
        context_len=[rows + 1], block_tables=[list(range(10))], sample_rows=list(range(rows)), sampling=sampling,
    )  # fmt: skip
    told = []
    for most in (64, 1):
        model = load(saved, tmp_path, max_num_seqs=most)
        allocate(model)
        told.append(model.execute(batch))
        model.close()
    whole, parts = told
    assert whole.tokens == parts.tokens == tokens[1:]
    for one, other in zip(whole.reports(0, rows), parts.reports(0, rows), strict=True):
        assert (one.token, one.rank, [i for i, _ in one.top]) == (other.token, other.rank, [i for i, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_rows_behind_the_vocabulary_are_never_chosen(tmp_path: Path) -> None:
    """https://github.com/vllm-project/vllm/issues/13175"""
    reference, path = save_random_model(tmp_path, "Llama", vocab_size=128)
    with torch.no_grad():
        reference.lm_head.weight[96:] *= 100
    reference.save_pretrained(path)
    model = load((reference, path), tmp_path)
    assert model.info.vocab_size == 96
    allocate(model)
    outputs = finish(model, [Run(prompt) for prompt in prompts()], 8, 64)
    assert max(max(output) for output in outputs) < 96


def test_info_describes_the_model(model: TorchModel) -> None:
    info = model.info
    assert (info.device, info.context_len, info.vocab_size) == ("cpu", 512, 96)
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert info.text.eos_token_ids == (2,)


class TestOrder:
    def test_kv_comes_before_the_first_step(self, saved: tuple[Any, Path], tmp_path: Path) -> None:
        model = load(saved, tmp_path)
        with pytest.raises(RuntimeError, match="allocate_kv must be called"):
            step(model, [(Run([5]), 1)], [0])
        allocate(model)
        with pytest.raises(RuntimeError, match="allocated already"):
            allocate(model)

    def test_nothing_runs_after_close(self, model: TorchModel) -> None:
        model.close()
        model.close()
        with pytest.raises(RuntimeError, match="closed"):
            step(model, [(Run([5]), 1)], [0])


class TestSleep:
    def test_the_same_weights_come_back(self, model: TorchModel) -> None:
        before = finish(model, [Run(prompt) for prompt in prompts()], 8, 64)
        model.release_kv()
        model.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            step(model, [(Run([5]), 1)], [0])
        model.wake()
        allocate(model)
        assert finish(model, [Run(prompt) for prompt in prompts()], 8, 64) == before

    def test_files_of_another_model_are_refused(self, tmp_path: Path) -> None:
        reference, path = save_random_model(tmp_path / "model", "Llama")
        model = load((reference, path), tmp_path)
        model.sleep()
        with torch.no_grad():
            reference.model.norm.weight += 1
        reference.save_pretrained(path)
        with pytest.raises(RuntimeError, match="another model now"):
            model.wake()


class TestMemory:
    def test_a_step_stays_within_what_the_structure_tells(self, tmp_path: Path) -> None:
        saved = save_random_model(tmp_path, "Llama", hidden_size=256, intermediate_size=1024, num_attention_heads=8)
        model = load(saved, tmp_path)
        allocate(model)
        run = Run([5] * 400)
        step(model, [(run, 400)], list(range(PAGES)))
        before = model.memory().used_bytes
        model.take_peak_bytes()
        run.computed = 0
        del run.tokens[400:]
        step(model, [(run, 400)], list(range(PAGES)))
        assert model.take_peak_bytes() - before <= model.activation_bytes(400, 1) + 2**20

    def test_the_default_is_a_gibibyte_on_the_cpu(self, model: TorchModel) -> None:
        assert model.default_kv_bytes == 2**30
        memory = model.memory()
        assert 0 < memory.used_bytes < memory.total_bytes


class TestChoices:
    def test_half_types_run(self, saved: tuple[Any, Path], tmp_path: Path) -> None:
        for dtype in ("bfloat16", "float16"):
            model = load(saved, tmp_path, dtype=dtype)
            allocate(model)
            assert model.info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
            (output,) = finish(model, [Run(prompts()[4])], 3, 64)
            assert len(output) == 3

    def test_auto_is_a_type_that_the_cpu_is_fast_at(self) -> None:
        native = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
        assert choose_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if native else torch.float32)

    def test_a_gpu_that_is_not_there(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        assert choose_device("auto").type == "cpu"
        with pytest.raises(ValueError, match="no usable GPU"):
            choose_device("cuda")

    def test_threads(self, saved: tuple[Any, Path], tmp_path: Path) -> None:
        before = torch.get_num_threads()
        try:
            load(saved, tmp_path, threads=1)
            assert torch.get_num_threads() == 1
        finally:
            torch.set_num_threads(before)

    def test_a_window_limits_the_context_and_says_so(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        saved = save_random_model(tmp_path, "Mistral", sliding_window=64)
        with caplog.at_level(logging.WARNING):
            model = load(saved, tmp_path)
        assert model.info.context_len == 64
        assert "window of 64 tokens" in caplog.text
