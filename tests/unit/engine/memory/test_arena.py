"""Only what the system itself says counts: the resident memory of this process."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine.memory.arena import Arena
from kernels.kv import UNIT_BYTES
from tests.unit.kernels.isas import needs_library

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident memory from /proc")

SLACK_BYTES = UNIT_BYTES // 4
"""What else may come and go in the meantime."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def fill(arena: Arena, first: int, count: int, value: int = 1) -> None:
    arena.bytes[first * UNIT_BYTES : (first + count) * UNIT_BYTES] = value


def test_addresses_take_no_memory_until_they_are_written() -> None:
    before = resident_bytes()
    arena = Arena(16384)
    assert resident_bytes() - before < SLACK_BYTES
    fill(arena, 100, 4)
    assert abs(resident_bytes() - before - 4 * UNIT_BYTES) < SLACK_BYTES
    arena.close()


def test_decommitted_units_leave_the_memory_and_read_as_zeros_and_the_others_stay() -> None:
    arena = Arena(8)
    fill(arena, 0, 8, 7)
    full = resident_bytes()
    arena.decommit(2, 5)
    assert abs(full - resident_bytes() - 5 * UNIT_BYTES) < SLACK_BYTES
    units = arena.bytes.reshape(8, UNIT_BYTES)
    assert [int(unit.min()) for unit in units] == [7, 7, 0, 0, 0, 0, 0, 7]
    fill(arena, 3, 1, 9)
    assert int(units[3].min()) == 9
    arena.close()


def test_closing_gives_all_memory_back_and_keeps_the_addresses() -> None:
    before = resident_bytes()
    arena = Arena(8)
    fill(arena, 0, 8)
    arena.close()
    assert resident_bytes() - before < SLACK_BYTES
    assert not arena.bytes.any()


def test_the_range_begins_at_a_whole_unit_and_its_address_is_the_arrays() -> None:
    arena = Arena(3)
    assert arena.address % UNIT_BYTES == 0
    assert len(arena.bytes) == 3 * UNIT_BYTES
    arena.bytes[UNIT_BYTES + 5] = 42
    assert ctypes.c_uint8.from_address(arena.address + UNIT_BYTES + 5).value == 42
    assert np.shares_memory(arena.bytes, arena.bytes[5:])


def test_what_lies_outside_is_not_decommitted() -> None:
    arena = Arena(3)
    for first, count in ((-1, 2), (2, 2), (4, 0)):
        with pytest.raises(ValueError, match="outside the arena of 3"):
            arena.decommit(first, count)


def test_a_range_that_the_system_refuses_is_no_larger_than_needed() -> None:
    assert Arena.reserve(2, 2**40).units == 2
    assert Arena.reserve(2, 64).units == 64
    assert Arena.reserve(2, 1).units == 2


LIMITED = """
import resource, sys
from engine import LLM
from bench.endurance.random_model import write_random_model
from pathlib import Path

place = Path(sys.argv[1])
model = write_random_model(place / "model")
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))
for kv_cache_bytes in (2**24, 2**40):
    with LLM(model, cache=place, device="cpu", threads=1, max_seq_len=64, kv_cache_bytes=kv_cache_bytes) as llm:
        print(llm._engine._memory.budget.kv_bytes, llm.generate("hello")[0].finish_reason)
try:
    LLM(model, cache=place, device="cpu", threads=1, max_seq_len=512, page_size=2**24)
except Exception as error:
    print(type(error).__name__, error)
"""


@needs_library
def test_a_limit_of_the_process_is_kept_or_told_clearly(tmp_path: Path, python: str) -> None:
    """It was overlooked: the budget spoke of the machine's memory, and the load ended with an OSError."""
    told = subprocess.run(
        [python, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    ).stdout.splitlines()
    assert told[0] == "16777216 length"
    assert 2**24 < int(told[1].split()[0]) < 2**29
    assert told[2].startswith("NoRoom")
