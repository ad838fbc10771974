"""Requests with adapters beside others without: each gets the tokens of the model that its adapter makes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, RequestOutput, SamplingParams
from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeModel
from engine.request import EngineRequest, RequestRefused
from engine.runner import TorchModel
from kernels.adapters import AdapterRows
from tests.unit.engine.model.random_adapters import LINEAR, save_random_adapter
from tests.unit.engine.model.random_models import VARIANTS, greedy_tokens, save_random_model
from tests.unit.engine.stepping import prompts
from tests.unit.kernels.isas import available

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Adapted:
    """A model, two adapters of it, and what `transformers` generates with each merged into the weights."""

    path: Path
    adapters: dict[str, Path]
    expected: dict[str | None, list[list[int]]]

    def llm(self, **config: Any) -> LLM:
        return LLM(self.path, cache=self.path.parent, dtype="float32", device="cpu", adapters=self.adapters, **config)


def adapted(tmp_path: Path, variant: str, targets: tuple[str, ...], **config: Any) -> Adapted:
    """Adapters of the variant: `all` of these targets, and `one` of the first of them, with another rank."""
    family, settings = VARIANTS[variant]
    base, path = save_random_model(tmp_path, family, **settings)
    adapters = {"all": tmp_path / "all", "one": tmp_path / "one"}
    merged = {
        "all": save_random_adapter(adapters["all"], base, targets, rank=6, seed=1, **config),
        "one": save_random_adapter(adapters["one"], base, targets[:1], rank=3, seed=2, use_rslora=True),
    }
    models: dict[str | None, Any] = {None: base, **merged}
    expected = {name: greedy_tokens(model, prompts(), 12) for name, model in models.items()}
    return Adapted(path, adapters, expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted(tmp_path_factory.mktemp("llama"), "llama3-rope", LINEAR)


def each_with_each(names: list[str | None]) -> list[tuple[list[int], str | None]]:
    return [(prompt, name) for prompt in prompts() for name in names]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("variant", "targets", "torch_serves"),
    [
        ("llama-biases", LINEAR, False),
        ("llama-biases", LINEAR, True),
        ("llama-narrow-heads", LINEAR, False),
        ("qwen3", ("up_proj", "o_proj", "k_proj"), False),
        ("phi3", PHI3, False),
        ("phi3", PHI3, True),
        ("gemma2", LINEAR, True),
        ("gpt2", ("c_attn", "c_proj", "c_fc"), True),
        ("qwen3-moe", ("q_proj", "v_proj", "o_proj"), True),
    ],
)
def test_a_mixed_batch_gives_each_request_what_the_merged_model_gives(
    tmp_path: Path, variant: str, targets: tuple[str, ...], torch_serves: bool
) -> None:
    """Families differ in how their products are joined, and in what serves them."""
    case = adapted(tmp_path, variant, targets)
    work = each_with_each([None, "all", "one"])
    with case.llm(max_num_batched_tokens=24, embeddings=torch_serves) as llm:
        outputs = llm.generate([prompt for prompt, _ in work], PARAMS, adapter=[name for _, name in work])
    expected = [case.expected[name][prompts().index(prompt)] for prompt, name in work]
    assert tokens(outputs) == expected
    assert len({tuple(map(tuple, of_one)) for of_one in case.expected.values()}) == 3, "the adapters change nothing"


@pytest.mark.parametrize("torch_serves", [False, True])
@pytest.mark.parametrize("name", [None, "all", "one"])
def test_alone_a_request_gets_the_same(llama: Adapted, name: str | None, torch_serves: bool) -> None:
    with llama.llm(embeddings=torch_serves) as llm:
        assert isinstance(llm._engine._model, TorchModel) == (torch_serves or not available())
        assert tokens(llm.generate(prompts(), PARAMS, adapter=name)) == llama.expected[name]


def test_overlapped_steps_keep_everybody_s_adapter(llama: Adapted) -> None:
    work = each_with_each([None, "all", "one"])
    with llama.llm(overlap=True, max_num_seqs=5, max_num_batched_tokens=24) as llm:
        outputs = llm.generate([prompt for prompt, _ in work], PARAMS, adapter=[name for _, name in work])
    assert tokens(outputs) == [llama.expected[name][prompts().index(prompt)] for prompt, name in work]


def test_pages_are_not_shared_between_adapters(llama: Adapted) -> None:
    """vLLM 30931, 42125: cached KV of the base model was read by a request with an adapter."""
    prompt, place = prompts()[5], 5
    with llama.llm() as llm:
        for name in (None, "all", "one", "all", None):
            (output,) = llm.generate(prompt, PARAMS, adapter=name)
            assert list(output.token_ids) == llama.expected[name][place]
        assert output.metrics.cached_tokens > 0, "the base model's own pages were found"


def test_the_same_files_under_another_name_share_pages_with_themselves(llama: Adapted, tmp_path: Path) -> None:
    shutil.copytree(llama.adapters["all"], tmp_path / "copy")
    with LLM(
        llama.path,
        cache=tmp_path,
        dtype="float32",
        device="cpu",
        adapters={"a": llama.adapters["all"], "b": tmp_path / "copy"},
    ) as llm:
        first, second = (llm.generate(prompts()[5], PARAMS, adapter=name)[0] for name in "ab")
    assert first.token_ids == second.token_ids
    assert second.metrics.cached_tokens > 0


def test_preempted_requests_come_back_with_their_adapters(llama: Adapted) -> None:
    for swap_space_bytes in (0, 2**24):
        with llama.llm(max_seq_len=64, kv_cache_bytes=4 * 2**20, page_size=4, swap_space_bytes=swap_space_bytes) as llm:
            engine = llm._engine
            work = each_with_each([None, "all", "one"])
            for number, (prompt, name) in enumerate(work):
                engine.add(EngineRequest(str(number), PARAMS, prompt=tuple(prompt), adapter=name))
            found: dict[str, list[int]] = {}
            steps = 0
            while engine.has_work:
                for output in engine.step().finished:
                    found[output.request_id] = list(output.token_ids)
                steps += 1
                if steps % 4 == 0:  # everybody makes way
                    engine._scheduler.make_room(0, 0.0)
                engine.check()
            for number, (prompt, name) in enumerate(work):
                assert found[str(number)] == llama.expected[name][prompts().index(prompt)]


def test_a_sleeping_model_wakes_with_its_adapters_or_not_at_all(llama: Adapted, tmp_path: Path) -> None:
    directory = tmp_path / "all"
    shutil.copytree(llama.adapters["all"], directory)
    with LLM(llama.path, cache=tmp_path, dtype="float32", device="cpu", adapters={"all": directory}) as llm:
        llm.sleep()
        llm.wake()
        assert tokens(llm.generate(prompts()[:2], PARAMS, adapter="all")) == llama.expected["all"][:2]
        llm.sleep()
        shutil.copy(llama.adapters["one"] / "adapter_model.safetensors", directory)
        (directory / "adapter_config.json").write_text((llama.adapters["one"] / "adapter_config.json").read_text())
        with pytest.raises(RuntimeError, match="adapter 'all' are those of another one now"):
            llm.wake()


def test_all_completions_of_a_request_have_its_adapter(llama: Adapted) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, n=3)
    with llama.llm() as llm:
        (output,) = llm.generate(prompts()[3], params, adapter="all")
    assert [list(choice.token_ids) for choice in output.choices] == [llama.expected["all"][3]] * 3


def test_guessed_tokens_are_those_that_the_adapter_chooses() -> None:
    model = FakeModel(cheap_rows=16, adapters=("a",), choose=lambda token, position: (token + position // 64) % 7)
    outputs = {}
    for guesses in (0, 4):
        engine = Engine(model, EngineConfig("fake", num_speculative_tokens=guesses, warm_up=False))
        for name in (None, "a"):
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            engine.add(EngineRequest(str(name), params, prompt=tuple(range(7)) * 8, adapter=name))
        done: list[RequestOutput] = []
        while engine.has_work:
            done += engine.step().finished
        outputs[guesses] = {output.request_id: output.token_ids for output in done}
        assert (engine.stats().accepted_tokens > 0) == bool(guesses)
        model.release_kv()
    assert outputs[0] == outputs[4]
    assert outputs[0]["None"] != outputs[0]["a"]


def test_a_base_row_is_the_same_bits_beside_adapted_ones(llama: Adapted) -> None:
    """The product of all rows is one either way; what adapters add goes to their own rows."""
    model = TorchModel.load(
        EngineConfig(str(llama.path), cache=llama.path.parent, dtype="float32", device="cpu", adapters=llama.adapters)
    )
    decoder = model._decoder
    assert decoder is not None
    layer = decoder.weights.layers[0]  # type: ignore[union-attr]
    x = torch.randn(6, layer.qkv.linear.in_features)
    mixed = layer.qkv(x, AdapterRows.of(torch.tensor([-1, 0, -1, 1, 1, -1]), 2))
    plain = layer.qkv(x)
    assert torch.equal(mixed[[0, 2, 5]], plain[[0, 2, 5]])
    assert not torch.isclose(mixed[[1, 3, 4]], plain[[1, 3, 4]]).all(1).any()
    model.close()


@pytest.mark.parametrize("adapters", [{}, {"a": "x", "b": "y"}])
def test_an_unknown_adapter_is_refused_with_those_that_exist(adapters: dict[str, str]) -> None:
    there = "it has a, b" if adapters else "it is served without any"
    with LLM("fake", adapters=adapters, warm_up=False) as llm:
        with pytest.raises(RequestRefused, match=f"the model has no adapter 'c': {there}") as refused:
            llm.generate("text", adapter="c")
        assert (refused.value.code, refused.value.param) == ("invalid_request", "adapter")


def test_an_adapter_beside_a_foreign_model_is_refused(tmp_path: Path) -> None:
    _, path = save_random_model(tmp_path, "Olmo2", eos_token_id=2, pad_token_id=0)
    with pytest.raises(ValueError, match=r"no adapter of .* can be served: architecture Olmo2ForCausalLM"):
        LLM(path, cache=tmp_path, adapters={"a": tmp_path})


def test_steps_without_adapters_say_nothing_of_them() -> None:
    seen: list[Batch] = []

    class Watched(FakeModel):
        def execute(self, batch: Batch) -> Any:
            seen.append(batch)
            return super().execute(batch)

    engine = Engine(Watched(adapters=("a", "b")), EngineConfig("fake", warm_up=False))
    for number, name in enumerate((None, None, "b")):
        engine.add(EngineRequest(str(number), SamplingParams(max_tokens=2 + number), prompt="text", adapter=name))
    while engine.has_work:
        engine.step()
    assert seen[0].adapters == [0, 0, 2]
    assert seen[-1].adapters == [2]
