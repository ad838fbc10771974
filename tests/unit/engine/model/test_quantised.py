"""A GGUF file's blocks as quantised weights: the numbers that the `gguf` package makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.model.quantised import quantised
from engine.model.weights import StoredTensor
from tests.unit.kernels.test_cpu_packing import q4_k_blocks

CPU = torch.device("cpu")
ROWS, INPUTS = 12, 512


def stored(kind: str, seed: int = 0) -> StoredTensor:
    """A matrix in blocks of a kind."""
    values = np.random.default_rng(seed).normal(0, 0.05, (ROWS, INPUTS)).astype(np.float32)
    data = q4_k_blocks(ROWS, INPUTS) if kind == "Q4_K" else gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    return StoredTensor(kind, (ROWS, INPUTS), data)


@pytest.mark.parametrize(
    ("kind", "bits", "difference"),
    [("Q4_0", 4, 0), ("Q4_1", 4, 1e-7), ("Q4_K", 4, 1e-6), ("Q8_0", 8, 0), ("Q5_1", 8, 6e-3), ("Q6_K", 8, 6e-3)],
)
def test_blocks_hold_what_the_package_reads_of_them(kind: str, bits: int, difference: float) -> None:
    if kind == "Q6_K":
        raw = np.random.default_rng(1).integers(0, 256, (ROWS, INPUTS // 256, 210), np.uint8)
        raw[..., 208:] = np.full(1, 0.01, np.float16).view(np.uint8)
        tensor = StoredTensor(kind, (ROWS, INPUTS), raw.reshape(ROWS, -1))
    else:
        tensor = stored(kind)
    weight = quantised([tensor], "gguf", CPU)
    assert weight is not None
    assert (weight.bits, weight.group) == (bits, 32)
    expected = torch.from_numpy(tensor.float32())
    error = (weight.restored(torch.float32) - expected).abs().max() / expected.abs().max()
    assert error <= difference


@pytest.mark.parametrize(
    ("kinds", "bits"), [(("Q4_0", "Q4_1", "Q4_K"), 4), (("Q4_0", "Q8_0"), 8), (("Q4_1", "F32"), None)]
)
def test_joined_matrices_take_the_widest_form_among_them(kinds: tuple[str, ...], bits: int | None) -> None:
    tensors = [stored(kind, seed) for seed, kind in enumerate(kinds)]
    weight = quantised(tensors, "gguf", CPU)
    assert (weight.bits if weight is not None else None) == bits
    if weight is not None:
        expected = torch.cat([torch.from_numpy(tensor.float32()) for tensor in tensors])
        torch.testing.assert_close(weight.restored(torch.float32), expected, rtol=0, atol=2e-3)


def test_blocks_that_make_no_whole_run_stay_as_they_are() -> None:
    values = np.ones((2, 96), np.float32)
    tensor = StoredTensor("Q4_0", (2, 96), gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0))
    assert quantised([tensor], "gguf", CPU) is None


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_other_forms_round_whatever_is_in_the_file(quantization: str) -> None:
    tensors = [stored("F32"), stored("Q8_0", 1)]
    weight = quantised(tensors, quantization, CPU)  # type: ignore[arg-type]
    assert weight is not None
    assert (weight.bits, weight.group, weight.out_features) == (int(quantization[3:]), 64, 2 * ROWS)
    expected = torch.cat([torch.from_numpy(tensor.float32()) for tensor in tensors])
    error = (weight.restored(torch.float32) - expected).norm() / expected.norm()
    assert error < (0.01 if quantization == "int8" else 0.11)


def test_blocks_are_cut_where_they_end() -> None:
    for kind, width in (("Q4_0", 64), ("Q4_K", 256)):
        tensor = stored(kind)
        cut = tensor.some_columns(slice(width, 2 * width))
        assert (cut.kind, cut.shape) == (kind, (ROWS, width))
        assert np.array_equal(cut.float32(), tensor.float32()[:, width : 2 * width])
        assert tensor.some_columns(slice(16, 48)).kind == "F32"
