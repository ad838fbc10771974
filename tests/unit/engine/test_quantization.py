"""Weights in 8 and 4 bits on torch: the tokens are those of a model whose weights were rounded before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.model import load_model
from engine.model.spec import UnsupportedModel
from engine.parallel.group import Group
from engine.runner import TorchModel
from kernels.reference import RestoredLinear
from kernels.weights import Bits
from tests.unit.engine.model.gguf_writing import model_metadata, model_tensors, tokenizer_metadata, write_gguf
from tests.unit.engine.model.random_adapters import save_random_adapter
from tests.unit.engine.model.random_models import VARIANTS, save_random_model
from tests.unit.engine.model.rounded_models import save_rounded
from tests.unit.engine.parallel.threads import divided
from tests.unit.engine.stepping import Run, allocate, finish, prompts

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
"""Of which groups of 64 inputs can be made, on each of two ranks too."""
GPT2 = {"n_embd": 64, "hidden_size": 64, "n_head": 4, "num_attention_heads": 4}
MOE = {"moe_intermediate_size": 64}
UNTIED = {"tie_word_embeddings": False}
CHANGES: dict[str, dict[str, Any]] = {"gpt2": GPT2, "qwen3-moe": SIZES | MOE, "llama-biases": SIZES | UNTIED}
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}


def save(parent: Path, variant: str, **changes: Any) -> Path:
    family, config = VARIANTS[variant]
    return save_random_model(parent, family, **{**config, **CHANGES.get(variant, SIZES), **changes})[1]


def load(path: Path, **config: Any) -> TorchModel:
    asked = EngineConfig(str(path), cache=path.parent, dtype="float32", device="cpu", **{"kernels": "torch", **config})
    model = load_model(asked)
    assert isinstance(model, TorchModel)
    return model


def tokens(model: TorchModel) -> list[list[int]]:
    allocate(model)
    found = finish(model, [Run(prompt) for prompt in prompts()], 12, chunk=7)
    model.close()
    return found


@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("variant", ["llama-biases", "gemma2", "phi3", "gpt2", "mixtral", "qwen3-moe"])
def test_tokens_are_those_of_weights_that_were_rounded_before(tmp_path: Path, variant: str, quantization: str) -> None:
    path = save(tmp_path, variant)
    expected = tokens(load(save_rounded(path, BITS[quantization])))
    model = load(path, quantization=quantization)
    assert model.info.dtype == quantization
    assert tokens(model) == expected
    assert expected != tokens(load(path)) or quantization == "int8", "rounding to 4 bits changes nothing"


@pytest.mark.parametrize("quantization", BITS)
def test_the_layers_take_less_memory(tmp_path: Path, quantization: str) -> None:
    path, bits = save(tmp_path, "qwen3"), BITS[quantization]
    decoder = load(path, quantization=quantization)._decoder
    assert decoder is not None
    for layer in decoder.weights.layers:  # type: ignore[union-attr]
        for projection in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
            linear = projection.linear
            assert isinstance(linear, RestoredLinear)
            weight = linear._weight
            numbers = weight.out_features * weight.in_features
            assert weight.numbers.nbytes + weight.scales.nbytes == numbers * bits // 8 + numbers // 64 * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int4", "device": "cpu"},
        {"quantization": "int4", "device": "cpu", "kv_cache_dtype": "int8"},
        {"quantization": "int8", "device": "cpu", "embeddings": True},
    ],
    ids=str,
)
def test_torch_serves_what_the_cpu_library_has_not(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, "llama3-rope")
    others = {"cache": tmp_path, "dtype": "float32", "max_seq_len": 128}
    with LLM(path, **others, **settings) as llm:
        found = [output.token_ids for output in llm.generate(prompts(), PARAMS)]
    assert "torch serves" in caplog.text
    rounded = save_rounded(path, BITS[settings["quantization"]])
    with LLM(rounded, **others, **(settings | {"quantization": "none", "kernels": "torch"})) as llm:
        assert [output.token_ids for output in llm.generate(prompts(), PARAMS)] == found


@pytest.mark.parametrize("quantization", BITS)
def test_a_custom_operation_beside_quantised_weights(tmp_path: Path, quantization: str) -> None:
    path = save(tmp_path, "llama3-rope")
    config: dict[str, Any] = {"cache": tmp_path, "dtype": "float32", "device": "cpu", "max_seq_len": 128}
    with LLM(path, quantization=quantization, **config) as llm:
        llm.register_op("silu", torch.nn.functional.silu)
        outputs = llm.generate(prompts(), PARAMS)
    assert [list(output.token_ids) for output in outputs] == tokens(load(save_rounded(path, BITS[quantization])))


@pytest.mark.parametrize("quantization", BITS)
def test_an_adapter_stays_in_floats(tmp_path: Path, quantization: str) -> None:
    family, config = VARIANTS["llama3-rope"]
    base, path = save_random_model(tmp_path, family, **(config | SIZES))
    adapters = {"one": tmp_path / "one"}
    save_random_adapter(adapters["one"], base, ("q_proj", "down_proj"))
    rounded = save_rounded(path, BITS[quantization])
    found = []
    for model in (
        load(path, quantization=quantization, adapters=adapters), load(rounded, adapters=adapters)
    ):  # fmt: skip
        allocate(model)
        runs = [Run(prompt, adapter=number % 2) for number, prompt in enumerate(prompts())]
        found.append(finish(model, runs, 12, chunk=7))
        model.close()
    assert found[0] == found[1]
    assert found[0] != tokens(load(rounded))


@pytest.mark.parametrize("quantization", BITS)
def test_ranks_divide_the_same_groups(tmp_path: Path, quantization: str) -> None:
    path = save(tmp_path, "llama-biases")
    expected = tokens(load(path, quantization=quantization))
    config = EngineConfig(
        str(path), cache=tmp_path, dtype="float32", device="cpu", quantization=quantization, max_num_seqs=8
    )

    def of_rank(group: Group) -> TorchModel:
        return TorchModel.load(config, group=group)

    with divided(tmp_path, 2, of_rank, allocate) as model:
        assert finish(model, [Run(prompt) for prompt in prompts()], 12, chunk=7) == expected


def test_a_sleeping_model_wakes_in_the_same_form(tmp_path: Path) -> None:
    path = save(tmp_path, "qwen3")
    with LLM(path, tmp_path, dtype="float32", device="cpu", quantization="int4", max_seq_len=128) as llm:
        before = [output.token_ids for output in llm.generate(prompts(), PARAMS)]
        llm.sleep()
        llm.wake()
        assert [output.token_ids for output in llm.generate(prompts(), PARAMS)] == before


class TestRefusals:
    @pytest.mark.parametrize("quantization", BITS)
    def test_inputs_that_fit_no_group(self, tmp_path: Path, quantization: str) -> None:
        path = save(tmp_path, "qwen3", intermediate_size=96)
        with pytest.raises(UnsupportedModel, match="groups of 64, and the model's MLPs' width is 96: set quantization"):
            load(path, quantization=quantization)

    def test_inputs_that_fit_no_group_once_they_are_divided(self, tmp_path: Path) -> None:
        path = save(tmp_path, "qwen3", head_dim=16)
        load(path, quantization="int4").close()
        with pytest.raises(UnsupportedModel, match=r"on each of 2 devices the model's width of all heads is 32.*fewer"):
            load(path, quantization="int4", tensor_parallel_size=2)

    def test_experts_that_fit_no_group(self, tmp_path: Path) -> None:
        path = save(tmp_path, "qwen3-moe", moe_intermediate_size=80)
        with pytest.raises(UnsupportedModel, match="experts' width is 80"):
            load(path, quantization="int8")

    def test_another_library_s_code(self, tmp_path: Path) -> None:
        _, path = save_random_model(tmp_path, "Olmo2", eos_token_id=2, pad_token_id=0)
        with pytest.raises(UnsupportedModel, match="takes its weights as they are: set quantization to none"):
            load(path, quantization="int8")

    def test_blocks_of_a_file_that_has_none(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="quantization='gguf' keeps the blocks of a GGUF file"):
            load(save(tmp_path, "qwen3"), quantization="gguf")


KINDS = ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "F16"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_s_blocks_are_used_as_they_are(tmp_path: Path, kind: str, ranks: int) -> None:
    """Those that are no form of ours are rounded to 8 bits, whose tokens are the same here."""
    reference, _ = save_random_model(tmp_path, "Llama", vocab_size=12, **SIZES)
    blocks = gguf.GGMLQuantizationType[kind]
    tensors = {
        name: (gguf.quantize(tensor, blocks), blocks) if name.startswith("blk.") and tensor.ndim == 2 else tensor
        for name, tensor in model_tensors(reference.state_dict(), reference.config, "llama").items()
    }
    metadata = model_metadata(reference.config, "llama") | tokenizer_metadata()
    path = write_gguf(tmp_path / "m.gguf", tensors, "llama", **metadata)
    given = [[token % 12 for token in prompt] for prompt in prompts()]

    def run(model: Any) -> list[list[int]]:
        return finish(model, [Run(list(prompt)) for prompt in given], 12, chunk=7)

    plain = load(path)
    allocate(plain)
    expected = run(plain)
    plain.close()
    config = EngineConfig(
        str(path), cache=tmp_path, dtype="float32", device="cpu", quantization="gguf", kernels="torch", max_num_seqs=8
    )
    if ranks == 1:
        model = TorchModel.load(config)
        allocate(model)
        decoder = model._decoder
        assert decoder is not None
        linear = decoder.weights.layers[0].qkv.linear  # type: ignore[union-attr]
        assert isinstance(linear, RestoredLinear) == (kind != "F16")
        if isinstance(linear, RestoredLinear):
            assert (linear._weight.bits, linear._weight.group) == (4 if kind.startswith("Q4") else 8, 32)
        assert run(model) == expected
        model.close()
        return
    with divided(tmp_path, 2, lambda group: TorchModel.load(config, group=group), allocate) as model:
        assert run(model) == expected
