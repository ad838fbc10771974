from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from engine.cpu import cache
from engine.cpu.cache import packed_bytes, packed_path, read_packed, write_packed
from engine.cpu.packed import ALIGNMENT_BYTES, PackedWeights, lay_out

IDENTITY = {"revision": "abc", "formats": 1, "quantization": "none", "dtype": "bfloat16"}


@pytest.fixture
def weights() -> PackedWeights:
    places, size = lay_out({"a": 5000, "b": 8, "c": 0, "d": 3 * ALIGNMENT_BYTES})
    block = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    return PackedWeights(block, places)


@pytest.fixture
def path(tmp_path: Path, weights: PackedWeights) -> Path:
    path = packed_path(tmp_path, IDENTITY)
    write_packed(path, IDENTITY, weights)
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


@pytest.mark.parametrize("field", list(IDENTITY))
def test_another_identity_has_another_place_and_is_not_read_from_this_one(path: Path, field: str) -> None:
    other = IDENTITY | {field: "other"}
    assert packed_path(path.parent.parent, other) != path
    assert read_packed(path, other, 1) is None


def test_a_full_disk_costs_a_warning_and_leaves_nothing(
    tmp_path: Path, weights: PackedWeights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(handle: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        write_packed(packed_path(tmp_path, IDENTITY), IDENTITY, weights)
    monkeypatch.undo()
    assert "No space left on device" in caplog.text
    assert list((tmp_path / "packed").iterdir()) == []


def test_a_cache_that_is_no_directory_costs_a_warning(
    tmp_path: Path, weights: PackedWeights, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "packed").write_text("in the way")
    write_packed(packed_path(tmp_path, IDENTITY), IDENTITY, weights)
    assert "can't be kept" in caplog.text
