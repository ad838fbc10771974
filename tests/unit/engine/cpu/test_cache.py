from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine.cpu import cache
from engine.cpu.cache import packed_bytes, packed_path, read_packed, write_packed
from engine.cpu.packed import ALIGNMENT_BYTES, PackedWeights, lay_out

IDENTITY: dict[str, str | int] = {
    "revision": "abc",
    "packing": 3,
    "recipe": 2,
    "quantization": "none",
    "dtype": "bfloat16",
}


@pytest.fixture
def weights() -> PackedWeights:
    places, size = lay_out({"a": 5000, "b": 8, "c": 0, "d": 3 * ALIGNMENT_BYTES})
    block = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    return PackedWeights(block, places)


@pytest.fixture
def path(tmp_path: Path, weights: PackedWeights) -> Path:
    path = packed_path(tmp_path, IDENTITY)
    write_packed(path, IDENTITY, weights, "a model")
    return path


def test_places_are_aligned_and_apart() -> None:
    places, size = lay_out({"a": 5000, "b": 1, "c": 4096, "d": 0})
    assert [(place.start, place.size_bytes) for place in places.values()] == [
        (0, 5000), (8192, 1), (12288, 4096), (16384, 0),
    ]  # fmt: skip
    assert size == 16384


@pytest.mark.parametrize("threads", [1, 3])
def test_what_was_written_is_read(
    path: Path, weights: PackedWeights, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_PIECE_BYTES", 1000)
    write_packed(path, IDENTITY, weights, "a model")
    got = read_packed(path, IDENTITY, threads)
    assert got is not None
    assert got.places == weights.places
    assert np.array_equal(got.block, weights.block)
    assert np.array_equal(got.bytes("b"), weights.bytes("b"))
    assert np.array_equal(got.floats("b"), weights.floats("b"), equal_nan=True)
    assert got.block.ctypes.data % ALIGNMENT_BYTES == 0
    assert list(path.parent.iterdir()) == [path]
    assert packed_bytes(path.parent.parent, "abc") == path.stat().st_size
    assert packed_bytes(path.parent.parent, "ab") == 0


def test_a_file_that_is_not_there_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_packed(tmp_path / "none", IDENTITY, 1) is None
    assert not caplog.records


@pytest.mark.parametrize("length", [0, 7, 43, 44, 100, 4096, 9000, -1])
def test_a_file_cut_short_is_of_no_use(path: Path, length: int, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(path.read_bytes()[:length])
    assert read_packed(path, IDENTITY, 2) is None
    assert "made again" in caplog.text


@pytest.mark.parametrize("at", [0, 7, 8, 12, 43, 44, 60, 150])
def test_a_damaged_front_is_of_no_use(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert read_packed(path, IDENTITY, 2) is None


@pytest.mark.parametrize("at", [0, 4999, 12288])
def test_damaged_weights_are_of_no_use(path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit in a matrix would serve nonsense without a word."""
    data = bytearray(path.read_bytes())
    data[ALIGNMENT_BYTES + at] ^= 16
    path.write_bytes(data)
    assert read_packed(path, IDENTITY, 2) is None
    assert "its weights are damaged" in caplog.text


@pytest.mark.parametrize("field", list(IDENTITY))
def test_another_identity_has_another_place_and_is_not_read_from_this_one(path: Path, field: str) -> None:
    other = IDENTITY | {field: 9 if isinstance(IDENTITY[field], int) else "other"}
    assert packed_path(path.parent.parent, other) != path
    assert read_packed(path, other, 1) is None


def test_a_full_disk_costs_a_warning_and_leaves_nothing(
    tmp_path: Path, weights: PackedWeights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(handle: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        write_packed(packed_path(tmp_path, IDENTITY), IDENTITY, weights, "a model")
    monkeypatch.undo()
    assert "No space left on device" in caplog.text
    assert list((tmp_path / "packed").iterdir()) == []


def test_a_cache_that_is_no_directory_costs_a_warning(
    tmp_path: Path, weights: PackedWeights, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "packed").write_text("in the way")
    write_packed(packed_path(tmp_path, IDENTITY), IDENTITY, weights, "a model")
    assert "can't be kept" in caplog.text


def keep(cache: Path, weights: PackedWeights, model: str = "a model", **other: str | int) -> Path:
    identity = IDENTITY | other
    path = packed_path(cache, identity)
    write_packed(path, identity, weights, model)
    return path


def test_what_a_file_replaces_is_removed_when_it_is_written(tmp_path: Path, weights: PackedWeights) -> None:
    keep(tmp_path, weights, revision="old")
    keep(tmp_path, weights, packing=2)
    keep(tmp_path, weights, recipe=1)
    first = keep(tmp_path, weights, quantization="int8")
    first.write_bytes(b"hrpack01" + first.read_bytes()[8:])
    written = keep(tmp_path, weights)
    assert list((tmp_path / "packed").iterdir()) == [written]


def test_what_may_be_read_again_stays(tmp_path: Path, weights: PackedWeights) -> None:
    others = [
        keep(tmp_path, weights, packing=4),
        keep(tmp_path, weights, quantization="int8"),
        keep(tmp_path, weights, "another model", revision="another"),
    ]
    foreign = tmp_path / "packed" / "notes.txt"
    foreign.write_text("somebody's")
    damaged = tmp_path / "packed" / "damaged.packed"
    damaged.write_bytes(b"what is it?")
    written = keep(tmp_path, weights)
    assert set((tmp_path / "packed").iterdir()) == {*others, foreign, damaged, written}


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path: Path, weights: PackedWeights) -> None:
    directory = keep(tmp_path, weights).parent
    old, fresh = directory / ".abc.packed.1", directory / ".abc.packed.2"
    for file in (old, fresh):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    keep(tmp_path, weights)
    assert not old.exists()
    assert fresh.exists()


KILLED_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
import numpy as np
from engine.cpu.cache import write_packed
from engine.cpu.packed import PackedWeights, lay_out

places, size = lay_out({"a": 64 * 2**20})
wrote = os.write
def die(handle, data):
    count = wrote(handle, data)
    if count > 2**20:
        os.kill(os.getpid(), signal.SIGKILL)
    return count
os.write = die
write_packed(Path(sys.argv[1]), {"revision": "abc"}, PackedWeights(np.zeros(size, np.uint8), places), "a model")
"""


def test_a_process_that_is_killed_while_it_writes_leaves_no_file_that_is_read(tmp_path: Path, python: str) -> None:
    path = tmp_path / "packed" / "abc.packed"
    done = subprocess.run([python, "-c", KILLED_WHILE_IT_WRITES, str(path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(list(path.parent.iterdir())) == 1
    assert read_packed(path, {"revision": "abc"}, 1) is None


def test_many_who_write_at_once_leave_one_whole_file(tmp_path: Path, weights: PackedWeights) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: keep(tmp_path, weights), range(32)))
    assert list((tmp_path / "packed").iterdir()) == list(paths)
    got = read_packed(paths.pop(), IDENTITY, 2)
    assert got is not None
    assert np.array_equal(got.block, weights.block)
