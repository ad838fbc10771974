from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.model.spec import ExpertsSpec, ModelSpec, RopeSpec, UnsupportedModel

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
MIXED = replace(SMOLLM2, local_layers=frozenset({0, 2}), local_window=512, local_rope=RopeSpec(10.0))


def test_kv_bytes_are_those_of_the_design() -> None:
    assert SMOLLM2.kv_bytes_per_token(2) == 23_040


def test_local_layers_have_a_window_and_their_own_positions() -> None:
    assert [MIXED.window(layer) for layer in range(4)] == [512, None, 512, None]
    assert [MIXED.rope_of(layer) for layer in range(3)] == [RopeSpec(10.0), RopeSpec(100000.0), RopeSpec(10.0)]
    assert SMOLLM2.rope_of(0) == RopeSpec(100000.0)


def test_the_reach_is_that_of_the_widest_layer() -> None:
    assert (SMOLLM2.reach_tokens, MIXED.reach_tokens) == (None, None)
    assert replace(MIXED, global_window=2000).reach_tokens == 2000
    assert replace(SMOLLM2, local_layers=frozenset(range(30)), local_window=100).reach_tokens == 100


def test_narrowing_never_widens_and_leaves_the_positions() -> None:
    assert MIXED.narrowed(None) is MIXED
    narrow = MIXED.narrowed(600)
    assert [narrow.window(layer) for layer in range(2)] == [512, 600]
    assert narrow.rope_of(0) == RopeSpec(10.0)
    assert [narrow.narrowed(700).window(layer) for layer in range(2)] == [512, 600]
    assert MIXED.narrowed(100).windows == {100}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"kv_heads": 2}, "can't share 2"),
        ({"head_size": 63}, "even head size"),
        ({"rope": RopeSpec(1.0, rotated=15)}, "15 of 64 components"),
        ({"local_rope": RopeSpec(1.0, rotated=66)}, "66 of 64 components"),
        ({"global_window": 0}, "one token at least, not 0"),
        ({"local_layers": frozenset({1})}, "doesn't say how wide"),
        ({"experts": ExpertsSpec(2, 3, 8)}, "3 of 2 experts"),
    ],
)
def test_senseless_structures_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        replace(SMOLLM2, **changes)


def test_odd_heads_are_no_trouble_without_rotation() -> None:
    assert replace(SMOLLM2, head_size=63, rope=None).scale == pytest.approx(63**-0.5)
