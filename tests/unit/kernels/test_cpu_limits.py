from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kernels.cpu.buffers import huge_bytes, pointer
from kernels.cpu.library import Team, load
from kernels.cpu.limits import measure
from kernels.cpu.packing import Format
from tests.unit.kernels.isas import every_isa


@every_isa()
def test_every_byte_is_read_once(isa: str) -> None:
    memory = huge_bytes(3 * 2**20)
    memory.view(np.uint32)[:] = np.random.default_rng(0).integers(0, 2**32, 3 * 2**18, dtype=np.uint32)
    with Team(load(isa), 3) as team:
        total = team.library.cdll.headrace_read_bytes(
            team.library.ops, team.handle, pointer(memory), ctypes.c_int64(memory.nbytes)
        )
    assert total == int(memory.view(np.uint32).sum(dtype=np.uint64))


@every_isa()
@pytest.mark.parametrize("form", [Format.F32, Format.BF16, Format.INT8])
def test_limits_grow_with_neither_rounds_nor_nothing(isa: str, form: Format) -> None:
    with Team(load(isa), 1) as team:
        limits = measure(team, form, huge_bytes(2**20), rounds=1)
    assert 0 < limits.operations_s < 1e14
    assert 0 < limits.read_bytes_s < 1e13
