"""What the machine can do at best: memory it reads, products it computes. `python -m bench.limits THREADS` measures."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

from bench.peers.place import ROOT

BUFFER_BYTES = 256 * 2**20
"""Far more than any cache holds."""
SIDE = 2048
"""Of the square matrices."""
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Limits:
    """Medians of a short measurement with torch, in bytes and operations (a multiplication and an addition are two)."""

    threads: int
    read_bytes_per_s: float
    read_one_thread_bytes_per_s: float
    bf16_ops_per_s: float
    int8_ops_per_s: float


def measure_limits(threads: int) -> Limits:
    """Measure in a process of its own, so that nothing stays in this one."""
    command = [sys.executable, "-m", "bench.limits", str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return Limits(**json.loads(done.stdout))


def _measure(threads: int) -> Limits:
    import torch

    torch.set_grad_enabled(False)
    buffer = torch.ones(BUFFER_BYTES // 4)
    reads = (partial(torch.dot, buffer, buffer), buffer.max, buffer.sum)

    def read_bytes_per_s(threads: int) -> float:
        torch.set_num_threads(threads)
        return max(BUFFER_BYTES / _seconds(read) for read in reads)

    one_thread = read_bytes_per_s(1)
    all_threads = read_bytes_per_s(threads)
    operations = 2 * SIDE**3
    bf16 = torch.randn(SIDE, SIDE).bfloat16()
    int8 = torch.randint(-100, 100, (SIDE, SIDE), dtype=torch.int8)
    return Limits(
        threads,
        all_threads,
        one_thread,
        operations / _seconds(partial(torch.mm, bf16, bf16)),
        operations / _seconds(partial(torch._int_mm, int8, int8)),
    )


def _seconds(work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return median(taken)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(int(sys.argv[1])))))
