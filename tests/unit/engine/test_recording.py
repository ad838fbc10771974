"""Work that is done again on the same memory, as a GPU's recordings do it; by the recorder of the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.recording import HostRecorder, StaleRecording


class Scaled:
    """Something that can be recorded: y = w * x."""

    def __init__(self) -> None:
        self.x = torch.ones(4)
        self.w = torch.full((4,), 2.0)

    def work(self) -> tuple[Tensor, ...]:
        scratch = self.w * self.x
        scratch += torch.tensor([1.0, 0.0, 0.0, 0.0])
        return (scratch.view(2, 2).sum(1),)

    def held(self) -> tuple[Tensor, ...]:
        return (self.x,)


def test_the_work_is_done_with_what_is_there_now_into_the_same_output() -> None:
    scaled = Scaled()
    recording = HostRecorder().record(scaled.work, scaled.held)
    [output] = recording.outputs
    assert output.tolist() == [5.0, 4.0]
    scaled.x.fill_(10)
    scaled.w.mul_(2)
    recording.replay()
    assert recording.outputs[0] is output
    assert output.tolist() == [81.0, 80.0]


def test_an_input_that_was_replaced_is_found() -> None:
    scaled = Scaled()
    recording = HostRecorder().record(scaled.work, scaled.held)
    scaled.x = torch.ones(4)
    with pytest.raises(StaleRecording, match="has been replaced"):
        recording.replay()


def test_any_other_memory_that_was_replaced_is_found() -> None:
    """A weight that was loaded again: a graph would go on with the old one."""
    scaled = Scaled()
    recording = HostRecorder().record(scaled.work, scaled.held)
    before = scaled.w
    scaled.w = scaled.w.clone()
    with pytest.raises(StaleRecording, match="hadn't known"):
        recording.replay()
    scaled.w = before
    recording.replay()


def test_a_view_elsewhere_in_known_memory_is_no_other_memory() -> None:
    scaled = Scaled()
    recording = HostRecorder().record(scaled.work, scaled.held)
    scaled.w = scaled.w[:]
    recording.replay()
