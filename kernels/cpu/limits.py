"""What this machine can do at best, measured: the ceiling that benchmarks are compared with."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.buffers import pointer
from kernels.cpu.library import Team
from kernels.cpu.packing import Format

_ROUNDS = 200_000


@dataclass(frozen=True)
class Limits:
    """Bytes read from memory and operations (two for each product) in registers, per second."""

    read_bytes_s: float
    operations_s: float


def measure(team: Team, form: Format, memory: NDArray[np.uint8], rounds: int = 5) -> Limits:
    """The best of `rounds`, by all threads of the team; `memory` should be far larger than the caches."""
    cdll, ops = team.library.cdll, team.library.ops
    read_s, multiply_s, operations = [], [], 0
    for _ in range(rounds):
        begin = time.perf_counter()
        cdll.headrace_read_bytes(ops, team.handle, pointer(memory), ctypes.c_int64(memory.nbytes))
        middle = time.perf_counter()
        operations = cdll.headrace_multiply_registers(ops, team.handle, ctypes.c_int32(form), ctypes.c_int64(_ROUNDS))
        read_s.append(middle - begin)
        multiply_s.append(time.perf_counter() - middle)
    return Limits(memory.nbytes / min(read_s), operations / min(multiply_s))
