"""Which part of a model each rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from engine.model.spec import ExpertsSpec, ModelSpec, RopeSpec, UnsupportedModel
from engine.model.split import Part, SplitWeights, check_divisible
from engine.model.weights import StoredTensor

SPEC = ModelSpec(
    architecture="llama", vocab_rows=10, hidden_size=8, layers=2, heads=12, kv_heads=4, head_size=2, inner_size=24,
    context_len=64, norm_eps=1e-6, rope=RopeSpec(10000.0),
)  # fmt: skip


class Numbered:
    """Tensors whose elements are numbered."""

    SHAPES: ClassVar = {
        "embedding": (10, 8), "norm": (8,), "0.q": (24, 8), "0.q.bias": (24,), "0.k": (8, 8), "0.k.bias": (8,),
        "0.o": (8, 24), "0.o.bias": (8,), "0.gate": (24, 8), "0.down": (8, 24), "0.experts.1.down": (8, 24),
        "0.experts.1.up": (24, 8), "0.router": (4, 8), "0.q_norm": (2,), "positions": (64, 8),
    }  # fmt: skip

    def __contains__(self, name: object) -> bool:
        return name in self.SHAPES

    def __getitem__(self, name: str) -> StoredTensor:
        shape = self.SHAPES[name]
        return StoredTensor("F32", shape, np.arange(np.prod(shape), dtype=np.float32).reshape(shape))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.SHAPES[name]


def shares(name: str, ranks: int, spec: ModelSpec = SPEC) -> list[np.ndarray]:
    found = [SplitWeights(Numbered(), spec, Part(rank, ranks)) for rank in range(ranks)]
    for weights in found:
        assert weights.shape(name) == weights[name].data.shape
    return [weights[name].float32() for weights in found]


@pytest.mark.parametrize("ranks", [2, 4])
class TestShares:
    @pytest.mark.parametrize("name", ["0.q", "0.k", "0.gate", "0.q.bias", "0.k.bias", "0.experts.1.up", "embedding"])
    def test_rows_of_all_ranks_are_the_whole(self, name: str, ranks: int) -> None:
        assert np.array_equal(np.concatenate(shares(name, ranks)), Numbered()[name].data)

    @pytest.mark.parametrize("name", ["0.o", "0.down", "0.experts.1.down"])
    def test_columns_of_all_ranks_are_the_whole(self, name: str, ranks: int) -> None:
        assert np.array_equal(np.concatenate(shares(name, ranks), axis=1), Numbered()[name].data)

    @pytest.mark.parametrize("name", ["norm", "0.router", "0.q_norm", "positions"])
    def test_the_rest_is_whole_on_every_rank(self, name: str, ranks: int) -> None:
        for share in shares(name, ranks):
            assert np.array_equal(share, Numbered()[name].data)

    def test_a_bias_behind_a_sum_is_added_once(self, ranks: int) -> None:
        assert np.array_equal(sum(shares("0.o.bias", ranks)), Numbered()["0.o.bias"].data)


def test_the_last_ranks_may_lack_tokens() -> None:
    assert [len(Part(rank, 4).tokens(10)) for rank in range(4)] == [3, 3, 3, 1]
    assert [len(Part(rank, 8).tokens(10)) for rank in range(8)] == [2, 2, 2, 2, 2, 0, 0, 0]


def test_ranks_share_a_key_head_if_there_are_too_few() -> None:
    spec = replace(SPEC, kv_heads=2)
    assert Part(0, 4).spec(spec).kv_heads == 1
    k = Numbered()["0.k"].data
    expected = [k[:2], k[:2], k[2:4], k[2:4]]
    assert all(np.array_equal(*pair) for pair in zip(shares("0.k", 4, spec), expected, strict=True))


def test_blocks_are_cut_by_columns() -> None:
    """A block of Q8_0 holds 32 elements: the cut may go through one."""
    block = np.concatenate([np.array([0x00, 0x3C], np.uint8), np.arange(32, dtype=np.uint8)])  # scale 1.0, 0 to 31
    stored = StoredTensor("Q8_0", (2, 32), np.stack([block, block]))
    cut = stored.some_columns(slice(8, 24))
    assert (cut.kind, cut.shape) == ("F32", (2, 16))
    assert np.array_equal(cut.float32(), np.stack([np.arange(8, 24)] * 2))


class TestRefusals:
    @pytest.mark.parametrize(
        ("spec", "ranks", "says"),
        [
            (SPEC, 5, "12 attention heads, 4 key/value heads, MLPs of 24.*these sizes divide it: 2, 4, 12"),
            (SPEC, 3, "these sizes divide it: 2, 4, 12"),
            (replace(SPEC, heads=5, kv_heads=5), 2, "it runs on one device only"),
            (replace(SPEC, inner_size=25), 2, "MLPs of 25.*on one device only"),
            (replace(SPEC, experts=ExpertsSpec(4, 2, 6)), 4, r"MLPs of 6\): these sizes divide it: 2$"),
            (
                replace(SPEC, experts=ExpertsSpec(4, 2, 6, dense_layers=frozenset({0}))),
                12,
                r"MLPs of 24 and of 6\): these sizes divide it: 2$",
            ),
        ],
    )
    def test_sizes_that_do_are_named(self, spec: ModelSpec, ranks: int, says: str) -> None:
        with pytest.raises(UnsupportedModel, match=says):
            Part(0, ranks).spec(spec)

    def test_widths_that_no_layer_has_don_t_matter(self) -> None:
        check_divisible(replace(SPEC, inner_size=25, experts=ExpertsSpec(4, 2, 8)), 4)
