"""Floors are what one computes by hand for SmolLM2-135M."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.floors import Shape, batch_floor_s, batch_step_floor_s, token_floor_s
from bench.limits import Limits

SHAPE = Shape(layers=30, hidden=576, inner=1536, vocab=49152, q_width=576, kv_width=192)
LIMITS = Limits(2, 78e9, 40e9, 860e9, 1857e9)


def test_the_shape_is_read_from_a_models_directory(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Shape.of(tmp_path) == SHAPE
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 128}))
    assert Shape.of(tmp_path).kv_width == 3 * 128


def test_operations_and_bytes_are_those_of_the_model() -> None:
    assert 2 * SHAPE.parameters == pytest.approx(0.269e9, rel=1e-2)
    assert 2 * SHAPE.layer_weights == pytest.approx(0.212e9, rel=1e-2)
    assert SHAPE.kv_bytes_per_token == 23040


def test_a_batch_is_bound_by_products_then_by_the_caches() -> None:
    alone = batch_floor_s(SHAPE, LIMITS, "bf16", [100], cached=0, new=1)
    products_s = 2 * (100 * SHAPE.layer_weights + SHAPE.vocab * SHAPE.hidden) / 860e9
    assert alone == pytest.approx(products_s + 100 * 23040 / 78e9)
    assert batch_floor_s(SHAPE, LIMITS, "int8", [100], cached=0, new=1) < 0.6 * alone
    two = batch_floor_s(SHAPE, LIMITS, "bf16", [356, 356], cached=256, new=1)
    assert two < 2 * batch_floor_s(SHAPE, LIMITS, "bf16", [356], cached=0, new=1)


def test_one_token_reads_all_weights() -> None:
    assert token_floor_s(SHAPE, LIMITS, 269_000_000, context=0) == pytest.approx(3.45e-3, rel=1e-2)
    assert batch_step_floor_s(SHAPE, LIMITS, 269_000_000, 1, 0) == pytest.approx(3.45e-3, rel=1e-2)
    assert batch_step_floor_s(SHAPE, LIMITS, 269_000_000, 64, 200) == pytest.approx(23.8e-3, rel=0.02)
