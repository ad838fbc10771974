"""Weights in 8 and 4 bits: how they are rounded, how they lie, and what they are again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.weights import GROUP, RUN, Bits, QuantisedWeight, pack_int4, unpack_int4

FORMS: list[tuple[Bits, int]] = [(8, 64), (8, 32), (4, 64), (4, 32)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_each_number_is_the_nearest_that_there_is(bits: Bits, group: int) -> None:
    """But for 4 bits where the greatest number's opposite has no step of its own."""
    weight = randn(40, 3 * RUN)
    made = QuantisedWeight.rounded(weight, bits, group)
    assert (made.out_features, made.in_features, made.group) == (40, 3 * RUN, group)
    assert made.scales.shape == (40, 3 * RUN // group)
    assert made.numbers.nbytes == weight.numel() * bits // 8
    steps = made.scales.abs().repeat_interleave(group, 1)
    error = (made.restored(torch.float32) - weight).abs() / steps
    assert error.max() <= (0.5001 if bits == 8 else 1.0001)
    assert (error <= 0.5001).float().mean() > 0.99


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_what_is_restored_rounds_to_itself(bits: Bits, group: int) -> None:
    made = QuantisedWeight.rounded(randn(8, 2 * RUN), bits, group)
    again = QuantisedWeight.rounded(made.restored(torch.float32), bits, group)
    torch.testing.assert_close(again.restored(torch.float32), made.restored(torch.float32), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_of_zeros_are_zeros_and_no_numbers_stay_none(bits: Bits) -> None:
    weight = randn(3, 2 * GROUP)
    weight[0, :GROUP] = 0
    weight[1, 3] = torch.nan
    restored = QuantisedWeight.rounded(weight, bits).restored(torch.float32)
    assert not restored[0, :GROUP].any()
    assert restored[1, :GROUP].isnan().all()
    assert not restored[[0, 2]].isnan().any()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_greatest_number_of_a_group_is_kept(bits: Bits) -> None:
    weight = randn(20, GROUP)
    restored = QuantisedWeight.rounded(weight, bits).restored(torch.float32)
    at = weight.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(restored.gather(1, at), weight.gather(1, at))


def test_four_bits_lie_two_to_a_byte() -> None:
    numbers = torch.arange(16, dtype=torch.uint8).repeat(2 * RUN // 16).view(1, -1)
    packed = pack_int4(numbers)
    assert packed.shape == (1, RUN)
    assert torch.equal(packed[0, : RUN // 2] & 15, numbers[0, : RUN // 2])
    assert torch.equal(packed[0, : RUN // 2] >> 4, numbers[0, RUN // 2 : RUN])
    assert torch.equal(unpack_int4(packed), numbers)


def test_minimums_say_what_a_zero_stands_for() -> None:
    made = QuantisedWeight.rounded(randn(5, RUN), 4, 32)
    moved = QuantisedWeight(4, made.numbers, made.scales, made.zeros + 3)
    torch.testing.assert_close(moved.restored(torch.float32), made.restored(torch.float32) + 3)


@pytest.mark.parametrize("bits", [8, 4])
def test_joined_weights_are_one_behind_the_other(bits: Bits) -> None:
    weights = [randn(rows, RUN, seed=rows) for rows in (5, 1, 9)]
    parts = [QuantisedWeight.rounded(weight, bits, 32) for weight in weights]
    if bits == 4:
        parts[1] = QuantisedWeight(4, parts[1].numbers, parts[1].scales.half(), (parts[1].zeros + 1).half())
    whole = QuantisedWeight.joined(parts)
    expected = torch.cat([part.restored(torch.float32) for part in parts])
    torch.testing.assert_close(whole.restored(torch.float32), expected)
    assert torch.equal(whole.restored(torch.float32, slice(4, 8)), whole.restored(torch.float32)[4:8])


@pytest.mark.parametrize(("bits", "group", "inputs"), [(8, 64, 100), (8, 64, 96), (4, 64, 32), (4, 32, 96)])
def test_inputs_that_fit_no_group_are_refused(bits: Bits, group: int, inputs: int) -> None:
    with pytest.raises(ValueError, match=f"{inputs} inputs can't be cut into groups of {group}"):
        QuantisedWeight.rounded(torch.zeros(2, inputs), bits, group)
