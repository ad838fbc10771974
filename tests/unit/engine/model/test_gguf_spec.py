from __future__ import annotations

from typing import Any

import pytest

from engine.model.gguf_spec import spec_from_gguf
from engine.model.spec import ModelSpec, RopeSpec, UnsupportedModel
from tests.unit.engine.model.test_spec import SMOLLM2

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


def gguf(tensors: frozenset[str] = frozenset(), **changes: Any) -> ModelSpec:
    return spec_from_gguf(GGUF | {f"llama.{k.replace('__', '.')}": v for k, v in changes.items()}, tensors, 49152)


def test_the_demo_model() -> None:
    assert gguf() == SMOLLM2


def test_tensors_tell_what_metadata_does_not() -> None:
    names = {"output.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"}
    spec = gguf(frozenset(names))
    assert (spec.tied_head, spec.qkv_bias, spec.qk_norm, spec.output_bias) == (False, True, True, False)


def test_head_size_of_its_own() -> None:
    assert gguf(attention__key_length=96, attention__value_length=96, rope__dimension_count=96).head_size == 96


def test_linear_scaling() -> None:
    assert gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).rope == RopeSpec(100000.0, 4.0)


def test_a_window_is_that_of_all_layers() -> None:
    spec = gguf(attention__sliding_window=1024)
    assert (spec.windows, spec.context_len) == ({1024}, 8192)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope__scaling__type": "yarn"}, "rope scaling of type 'yarn'"),
        ({"rope__dimension_count": 32}, "a part of a head"),
        ({"attention__value_length": 32}, "values of another size"),
        ({"expert_count": 8}, "mixture of experts"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        gguf(**changes)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="GGUF architecture 'gemma3'"):
        spec_from_gguf({"general.architecture": "gemma3"}, frozenset(), 10)
