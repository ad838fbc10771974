"""SHA-256 of files, remembered beside the models so that large ones are read once. No torch here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

REVISION_CHARS = 16


def file_sha256(path: Path, cache: Path) -> str:
    """The file's digest in hex; read again only if its size or one of its times differs from the last time.

    Whoever copies over a file may give it the old time of its content, but not that of its inode.
    """
    stat = path.stat()
    place = str(path.resolve())
    identity = [place, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    note = cache / "digests" / (hashlib.sha256(place.encode()).hexdigest()[:32] + ".json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(note.read_text())
        if known["file"] == identity:
            return str(known["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a cache that can't be written only costs time
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, json.dumps({"file": identity, "sha256": digest}).encode())
    return digest


def revision_of(files: Sequence[Path], cache: Path) -> str:
    """A hash over the names and contents of all files that a model consists of."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.name}\0{file_sha256(path, cache)}\n".encode())
    return total.hexdigest()[:REVISION_CHARS]


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old content or the new, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
