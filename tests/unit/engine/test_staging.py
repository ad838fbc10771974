"""The numbers of steps on their way to a device that may still read the last ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.staging import ALIGNMENT_BYTES, LEAST_BYTES, TURNS, Staging, layout, views

CPU = torch.device("cpu")
PARTS = [np.array([0.5, 1e300]), np.array([2**40]), np.arange(3, dtype=np.int32), np.array([[1, 2], [3, 4]], np.int32)]


class LateFence:
    """Of a device that reads a buffer only when it is waited for."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def set(self) -> None:
        self.waits.append("set")

    def wait(self) -> None:
        self.waits.append("wait")


def test_parts_arrive_as_they_were() -> None:
    staging = Staging(CPU)
    for _ in range(3):
        got = staging.send(PARTS)
        assert [part.tolist() for part in got] == [part.tolist() for part in PARTS]
        assert [part.dtype for part in got] == [torch.float64, torch.int64, torch.int32, torch.int32]


def test_what_arrived_is_not_touched_by_the_next() -> None:
    staging = Staging(CPU)
    [first] = staging.send([np.array([1, 2, 3], np.int32)])
    for number in range(4):
        staging.send([np.full(3, number, np.int32)])
    assert first.tolist() == [1, 2, 3]


def test_every_part_is_aligned_whatever_came_before_it() -> None:
    for count in range(1, 9):
        parts = [np.zeros(count, np.int32), np.zeros(count, np.float64), np.zeros(0, np.int32), np.zeros(1, np.int64)]
        places, size = layout(parts)
        assert all(place % ALIGNMENT_BYTES == 0 for place in places)
        assert size <= sum(part.nbytes + ALIGNMENT_BYTES for part in parts)


def test_parts_may_go_to_the_same_place_each_time() -> None:
    staging, into = Staging(CPU), torch.zeros(layout(PARTS)[1], dtype=torch.uint8)
    seen = views(PARTS, into)
    got = staging.send(PARTS, into)
    assert [part.data_ptr() for part in got] == [part.data_ptr() for part in seen]
    staging.send([*PARTS[:3], np.array([[5, 6], [7, 8]], np.int32)], into)
    assert seen[3].tolist() == [[5, 6], [7, 8]]


def test_a_buffer_is_written_again_only_after_the_device_has_read_it() -> None:
    fences: list[LateFence] = []

    def fence() -> LateFence:
        fences.append(LateFence())
        return fences[-1]

    staging = Staging(CPU, fence)
    for _ in range(2 * TURNS):
        staging.send(PARTS)
    assert len(fences) == TURNS
    assert all(fence.waits == ["wait", "set", "wait", "set"] for fence in fences)


@pytest.mark.parametrize("bytes_more", [0, 8])
def test_a_step_may_be_larger_than_any_before_it(bytes_more: int) -> None:
    staging = Staging(CPU)
    staging.send(PARTS)
    large = np.arange((LEAST_BYTES + bytes_more) // 4, dtype=np.int32)
    for _ in range(TURNS + 1):
        assert np.array_equal(staging.send([large])[0].numpy(), large)
