from __future__ import annotations

from typing import Any

import pytest

from engine.model.spec import (
    Llama3Scaling,
    ModelSpec,
    RopeSpec,
    UnsupportedModel,
    spec_from_gguf,
    spec_from_hf,
)

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SMOLLM2 = ModelSpec(
    architecture="llama",
    vocab_rows=49152,
    hidden_size=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_size=64,
    inner_size=1536,
    context_len=8192,
    norm_eps=1e-5,
    rope=RopeSpec(100000.0),
    tied_head=True,
)


def hf(**changes: Any) -> ModelSpec:
    return spec_from_hf(HF | changes)


def gguf(tensors: frozenset[str] = frozenset(), **changes: Any) -> ModelSpec:
    return spec_from_gguf(GGUF | {f"llama.{k.replace('__', '.')}": v for k, v in changes.items()}, tensors, 49152)


def test_the_same_model_from_both_kinds_of_file() -> None:
    assert hf() == SMOLLM2
    assert gguf() == SMOLLM2


def test_kv_bytes_are_those_of_the_design() -> None:
    assert SMOLLM2.kv_bytes_per_token(2) == 23_040


class TestHF:
    def test_qwen2_has_biases_on_qkv_only(self) -> None:
        spec = hf(architectures=["Qwen2ForCausalLM"])
        assert (spec.qkv_bias, spec.output_bias, spec.qk_norm) == (True, False, False)

    def test_qwen3_normalises_heads(self) -> None:
        spec = hf(architectures=["Qwen3ForCausalLM"], head_dim=128)
        assert (spec.qk_norm, spec.qkv_bias, spec.head_size) == (True, False, 128)

    def test_attention_bias_is_on_all_four(self) -> None:
        spec = hf(attention_bias=True, mlp_bias=True)
        assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, True)

    def test_every_head_has_its_own_keys_unless_said_otherwise(self) -> None:
        config = {name: value for name, value in HF.items() if name != "num_key_value_heads"}
        assert spec_from_hf(config).kv_heads == 9

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}},
        ],
        ids=["rope_type", "type", "rope_parameters"],
    )
    def test_linear_scaling_in_old_and_new_configurations(self, rope: dict[str, Any]) -> None:
        assert hf(**rope).rope == RopeSpec(5.0, linear_factor=2.0)

    def test_llama3_scaling(self) -> None:
        scaling = {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        assert hf(rope_scaling=scaling).rope == RopeSpec(100000.0, llama3=Llama3Scaling(32.0, 1.0, 4.0, 8192))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            (
                {"architectures": ["GPT2LMHeadModel"]},
                "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM",
            ),
            ({"architectures": None}, "architecture unnamed"),
            ({"hidden_act": "gelu"}, "activation 'gelu'"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn'"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
            ({"num_key_value_heads": 2}, "9 attention heads can't share 2"),
            ({"head_dim": 63}, "even head size"),
        ],
    )
    def test_what_would_change_the_result_is_refused(self, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(UnsupportedModel, match=said):
            hf(**changes)

    @pytest.mark.parametrize(
        ("changes", "usable"),
        [
            ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 4096),
            ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 8192),
            ({"architectures": ["MistralForCausalLM"]}, 4096),
            ({"architectures": ["MistralForCausalLM"], "sliding_window": 100_000}, 8192),
            ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}, 8192),
            ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": True}, 4096),
            (
                {
                    "architectures": ["Qwen2ForCausalLM"],
                    "sliding_window": 4096,
                    "use_sliding_window": True,
                    "layer_types": ["full_attention"] * 30,
                },
                8192,
            ),
        ],
    )
    def test_a_window_limits_the_context_where_it_would_matter(self, changes: dict[str, Any], usable: int) -> None:
        assert hf(**changes).usable_context_len == usable


class TestGGUF:
    def test_tensors_tell_what_metadata_does_not(self) -> None:
        names = {"output.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"}
        spec = gguf(frozenset(names))
        assert (spec.tied_head, spec.qkv_bias, spec.qk_norm, spec.output_bias) == (False, True, True, False)

    def test_head_size_of_its_own(self) -> None:
        assert gguf(attention__key_length=96, attention__value_length=96, rope__dimension_count=96).head_size == 96

    def test_linear_scaling(self) -> None:
        assert gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).rope == RopeSpec(100000.0, 4.0)

    def test_a_window(self) -> None:
        assert gguf(attention__sliding_window=1024).usable_context_len == 1024

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"rope__scaling__type": "yarn"}, "rope scaling of type 'yarn'"),
            ({"rope__dimension_count": 32}, "a part of a head"),
            ({"attention__value_length": 32}, "values of another size"),
            ({"expert_count": 8}, "mixture of experts"),
        ],
    )
    def test_what_would_change_the_result_is_refused(self, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(UnsupportedModel, match=said):
            gguf(**changes)

    def test_another_architecture_is_refused(self) -> None:
        with pytest.raises(UnsupportedModel, match="GGUF architecture 'gemma3'"):
            spec_from_gguf({"general.architecture": "gemma3"}, frozenset(), 10)
