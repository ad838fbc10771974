"""Configurations as they are on the hub, old and new; what their models compute is `test_decoder`'s affair."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from engine.model.families import FAMILIES, spec_from_hf
from engine.model.hf_names import Checkpoint, Place
from engine.model.spec import (
    ExpertsSpec,
    ForeignModel,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    RopeSpec,
    UnsupportedModel,
    YarnScaling,
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
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
"""All that its file says of the decoder."""


def hf(**changes: Any) -> ModelSpec:
    return spec_from_hf(HF | changes)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_takes(name: str) -> None:
    whole = getattr(transformers, name).config_class().to_dict()
    assert spec_from_hf({"architectures": [name]}) == spec_from_hf(whole | {"architectures": [name]})


def test_mixtral_turns_its_heads_with_a_base_of_its_own() -> None:
    assert spec_from_hf({"architectures": ["MixtralForCausalLM"]}).rope == RopeSpec(1_000_000.0)


@pytest.mark.parametrize(
    ("said", "meant"), [("gelu", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("silu", "silu")]
)
def test_gemmas_activation_is_its_hidden_act(said: str, meant: str) -> None:
    spec = spec_from_hf({"architectures": ["GemmaForCausalLM"], "hidden_act": said, "hidden_activation": None})
    assert spec.activation == meant


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM"])
def test_a_window_of_all_layers_heeds_no_layer_types(name: str) -> None:
    spec = hf(architectures=[name], sliding_window=7, layer_types=["full_attention"] * 30)
    assert (spec.local_window, len(spec.local_layers)) == (7, 30)


@pytest.mark.parametrize(("name", "rotated"), [("LlamaForCausalLM", None), ("Phi3ForCausalLM", 32)])
def test_only_some_families_turn_a_part_of_their_heads(name: str, rotated: int | None) -> None:
    rope = hf(architectures=[name], partial_rotary_factor=0.5).rope
    assert rope is not None
    assert rope.rotated == rotated


def test_qwen2_has_biases_on_qkv_only() -> None:
    spec = hf(architectures=["Qwen2ForCausalLM"])
    assert (spec.qkv_bias, spec.output_bias, spec.qk_norm) == (True, False, False)


def test_qwen3_normalises_heads() -> None:
    spec = hf(architectures=["Qwen3ForCausalLM"], head_dim=128)
    assert (spec.qk_norm, spec.qkv_bias, spec.head_size) == (True, False, 128)


def test_attention_bias_is_on_all_four() -> None:
    spec = hf(attention_bias=True, mlp_bias=True)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, True)


def test_every_head_has_its_own_keys_unless_said_otherwise() -> None:
    config = {name: value for name, value in HF.items() if name != "num_key_value_heads"}
    assert spec_from_hf(config).kv_heads == 9


class TestRope:
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
        assert hf(rope_scaling=scaling).rope == RopeSpec(100000.0, scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192))

    def test_yarn_as_qwen_writes_it(self) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        rope = hf(architectures=["Qwen2ForCausalLM"], rope_scaling=scaling).rope
        assert rope is not None
        assert rope.scaling == YarnScaling(4.0, 32768)
        assert rope.amplitude == pytest.approx(1.1386294)

    def test_longrope_as_phi3_writes_it(self) -> None:
        """The original context stands beside the model's own, and the factor is their ratio."""
        factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "type": "longrope"}
        rope = hf(
            architectures=["Phi3ForCausalLM"],
            rope_scaling=factors,
            original_max_position_embeddings=4096,
            max_position_embeddings=131072,
        ).rope
        assert rope is not None
        assert rope.scaling == LongRopeScaling((1.0,) * 32, (2.0,) * 32, 4096)
        assert rope.amplitude == pytest.approx(1.19023807)

    def test_a_part_of_each_head(self) -> None:
        rope = hf(architectures=["Phi3ForCausalLM"], partial_rotary_factor=0.75).rope
        assert rope == RopeSpec(100000.0, rotated=48)


class TestWindows:
    @pytest.mark.parametrize(
        ("changes", "windows"),
        [
            ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, {1024}),
            ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {None}),
            ({"architectures": ["MistralForCausalLM"]}, {4096}),
            ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": False}, {None}),
            ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": True}, {None, 9}),
            (
                {
                    "architectures": ["Qwen2ForCausalLM"],
                    "sliding_window": 9,
                    "use_sliding_window": True,
                    "layer_types": ["full_attention"] * 30,
                },
                {None},
            ),
            ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, {None}),
        ],
    )
    def test_who_has_one(self, changes: dict[str, Any], windows: set[int | None]) -> None:
        assert hf(**changes).windows == windows

    def test_qwen2_has_it_in_its_last_layers(self) -> None:
        spec = hf(architectures=["Qwen2ForCausalLM"], sliding_window=9, use_sliding_window=True, max_window_layers=27)
        assert [spec.window(layer) for layer in (0, 26, 27, 29)] == [None, None, 9, 9]

    def test_types_of_layers_go_before_the_rule_of_the_family(self) -> None:
        types = ["full_attention", "sliding_attention"] * 15
        spec = hf(architectures=["Gemma2ForCausalLM"], head_dim=64, sliding_window=9, layer_types=types)
        assert [spec.window(layer) for layer in (0, 1, 29)] == [None, 9, 9]


class TestGemma:
    def test_gemma2_takes_what_is_not_said_from_its_defaults(self) -> None:
        spec = spec_from_hf({"architectures": ["Gemma2ForCausalLM"]})
        assert (spec.hidden_size, spec.layers, spec.heads, spec.head_size) == (2304, 26, 8, 256)
        assert (spec.score_cap, spec.logit_cap, spec.scale) == (50.0, 30.0, 1 / 16)
        assert (spec.embedding_scale, spec.activation, spec.post_norms) == (48.0, "gelu_tanh", True)
        assert (spec.window(0), spec.window(1)) == (4096, None)

    def test_the_activation_that_old_files_of_gemma_name_is_not_the_one_it_has(self) -> None:
        """https://github.com/huggingface/transformers/pull/29402"""
        spec = hf(architectures=["GemmaForCausalLM"], hidden_act="gelu", head_dim=64)
        assert (spec.activation, spec.norm_from_one, spec.post_norms) == ("gelu_tanh", True, False)

    def test_gemma3_with_eyes_is_read_for_its_text(self) -> None:
        spec = spec_from_hf(GEMMA3_4B)
        assert (spec.architecture, spec.hidden_size, spec.layers, spec.context_len) == ("gemma3", 2560, 34, 131_072)
        assert (spec.rope_of(5), spec.rope_of(4)) == (RopeSpec(1e6, linear_factor=8.0), RopeSpec(10_000.0))
        assert [spec.window(layer) for layer in (4, 5, 6, 11)] == [1024, None, 1024, None]
        assert (spec.score_cap, spec.logit_cap, spec.qk_norm) == (None, None, True)

    def test_the_names_of_its_tensors_have_another_beginning(self) -> None:
        files = {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"}
        checkpoint = Checkpoint(FAMILIES["Gemma3ForConditionalGeneration"].names, spec_from_hf(GEMMA3_4B), files)
        assert checkpoint.place("head") == Place("language_model.lm_head.weight")
        assert checkpoint.place("3.mlp_norm") == Place("language_model.model.layers.3.pre_feedforward_layernorm.weight")


def test_gpt2_by_its_own_names() -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    spec = spec_from_hf(config | {"vocab_size": 50257})
    assert (spec.hidden_size, spec.layers, spec.heads, spec.head_size, spec.inner_size) == (768, 12, 12, 64, 3072)
    assert (spec.rope, spec.norm, spec.gated, spec.tied_head) == (None, "layer", False, True)
    names = Checkpoint(FAMILIES["GPT2LMHeadModel"].names, spec, {"wte.weight"})
    assert names.place("2.v") == Place("h.2.attn.c_attn.weight", slice(1536, 2304), transposed=True)
    assert names.place("2.v.bias") == Place("h.2.attn.c_attn.bias", slice(1536, 2304))
    assert names.place("positions") == Place("wpe.weight")
    assert names.place("2.gate") is None


def test_experts() -> None:
    mixtral = hf(architectures=["MixtralForCausalLM"], num_local_experts=8, num_experts_per_tok=2)
    assert mixtral.experts == ExpertsSpec(8, 2, 1536)
    config = {"num_experts": 128, "moe_intermediate_size": 96, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    qwen = hf(architectures=["Qwen3MoeForCausalLM"], **config)
    assert qwen.experts is not None
    assert (qwen.experts.count, qwen.experts.chosen, qwen.experts.normalised) == (128, 8, False)
    assert [qwen.has_experts(layer) for layer in (0, 1, 2, 3)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are LlamaForCausalLM"),
        ({"architectures": None}, "architecture unnamed"),
    ],
)
def test_another_architecture_is_foreign(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ForeignModel, match=said):
        hf(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope scaling of type 'dynamic'"),
        ({"num_key_value_heads": 2}, "9 attention heads can't share 2"),
        ({"head_dim": 63}, "even head size"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.3}, "19 of 64 components"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "both directions"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                },
            },
            "1 and 1 factors for 32 frequencies",
        ),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        hf(**changes)
