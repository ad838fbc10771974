from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from engine.model.digest import file_sha256, revision_of, write_atomically


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    for _ in range(2):
        assert file_sha256(file, tmp_path / "cache") == hashlib.sha256(b"abc").hexdigest()


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    first = file_sha256(file, tmp_path)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert file_sha256(file, tmp_path) == first


def test_a_change_that_keeps_size_and_time_is_noticed(tmp_path: Path) -> None:
    """As `rsync --inplace --times` and `cp --preserve` make it: a model slept and woke with others' weights."""
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    first, stat = file_sha256(file, tmp_path), file.stat()
    with file.open("r+b") as handle:
        handle.write(b"xyz")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert file_sha256(file, tmp_path) == hashlib.sha256(b"xyz").hexdigest() != first


@pytest.mark.parametrize("note", [b"", b"[]", b"{", b'{"file": 3}'])
def test_a_broken_note_is_not_believed(tmp_path: Path, note: bytes) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    expected = file_sha256(file, tmp_path)
    (written,) = (tmp_path / "digests").iterdir()
    written.write_bytes(note)
    assert file_sha256(file, tmp_path) == expected


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abc")
    assert file_sha256(file, file / "impossible") == hashlib.sha256(b"abc").hexdigest()


def test_a_revision_depends_on_names_and_contents_but_not_on_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"1")
    b.write_bytes(b"2")
    first = revision_of([a, b], tmp_path)
    assert revision_of([b, a], tmp_path) == first
    a.write_bytes(b"2")
    b.write_bytes(b"1")
    assert revision_of([a, b], tmp_path) != first


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "text")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["target"]
