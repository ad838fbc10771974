"""Each fault that the sanitiser is for, in a kernel that has it; and that it leaves right kernels alone."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import interpreter
from kernels.triton.checks.sanitizer import sanitized

interpreter.install()


@triton.jit
def _copy(source, target, count, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i + shift, tl.load(source + i, mask=i < count), mask=i < count)


@triton.jit
def _scatter(source, places, target, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + tl.load(places + i), tl.load(source + i))


@triton.jit
def _halve(bytes_, out, offset):
    tl.store(out, tl.load((bytes_ + offset).to(tl.pointer_type(tl.float32))))


def numbers(count: int = 16) -> Tensor:
    return torch.arange(count, dtype=torch.float32)


def test_a_right_kernel_passes_and_its_bytes_are_counted() -> None:
    target = torch.zeros(12)
    with sanitized() as report:
        _copy[(2,)](numbers(), target, 12, 0, BLOCK=8)
    assert torch.equal(target, numbers(12))
    assert (report.launches, report.loaded_bytes, report.stored_bytes) == (1, 48, 48)
    assert report.distinct_loaded_bytes == 48


def test_writing_behind_a_tensor_is_found_though_another_one_may_lie_there() -> None:
    with sanitized(), pytest.raises(Exception, match=r"store of program .*4 lanes outside every tensor"):
        _copy[(2,)](numbers(), torch.zeros(12), 16, 0, BLOCK=8)


def test_reading_before_a_tensor_is_found() -> None:
    with sanitized(), pytest.raises(Exception, match=r"load of program .* outside every tensor"):
        _copy[(1,)](numbers()[4:][:0], torch.zeros(8), 8, 0, BLOCK=8)


def test_two_programs_that_write_one_address_race() -> None:
    places = torch.tensor([0, 1, 2, 3, 3, 4, 5, 6])
    with sanitized(), pytest.raises(Exception, match="another program of the same launch wrote"):
        _scatter[(2,)](numbers(8), places, torch.zeros(8), BLOCK=4)


def test_two_lanes_of_one_store_race() -> None:
    with sanitized(), pytest.raises(Exception, match="two lanes of one store"):
        _scatter[(1,)](numbers(4), torch.tensor([0, 1, 1, 3]), torch.zeros(8), BLOCK=4)


def test_reading_what_another_program_writes_is_a_race_in_either_order() -> None:
    both = numbers()
    with sanitized(), pytest.raises(Exception, match=r"reads what program|of the same launch read"):
        _copy[(2,)](both, both, 12, 4, BLOCK=4)
    with sanitized(), pytest.raises(Exception, match=r"reads what program|of the same launch read"):
        _copy[(2,)](both[4:], both, 8, 0, BLOCK=4)


def test_misaligned_accesses_are_found() -> None:
    data = torch.zeros(16, dtype=torch.uint8)
    with sanitized():
        _halve[(1,)](data, torch.zeros(1), 4)
        with pytest.raises(Exception, match="not aligned to 4 bytes"):
            _halve[(1,)](data, torch.zeros(1), 2)


def test_views_of_one_storage_stay_views_of_one() -> None:
    arena = torch.zeros(32)
    with sanitized():
        _copy[(1,)](numbers(8), arena[8:], 8, 0, BLOCK=8)
        _copy[(1,)](arena[8:], arena[20:], 8, 0, BLOCK=8)
    assert torch.equal(arena[20:28], numbers(8))
    assert not arena[:8].any()
