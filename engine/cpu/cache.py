"""Packed weights on disk, so that they are packed once: a JSON header and the block as it lies in memory.

    8 bytes   magic and version of this file's form
    4 bytes   length of the header
    32 bytes  SHA-256 of the header
    header    JSON: what the weights were packed from and how, the places of the arrays, the block's size
    padding   up to a multiple of 4096
    block

A file that isn't whole, or was packed from or by something else, is as good as none. It is written
beside its place and renamed, so readers see all of it or nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cpu.packed import ALIGNMENT_BYTES, PackedWeights, Place, new_block

logger = logging.getLogger(__name__)

MAGIC = b"hrpack01"
_PIECE_BYTES = 8 * 2**20
SUFFIX = ".packed"

Identity = Mapping[str, str | int]
"""What decides the packed bytes: the files' revision, the library's version of its formats, quantization, dtype."""


def packed_path(cache: Path, identity: Identity) -> Path:
    """Where the packed weights of this identity are kept."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache / "packed" / f"{identity['revision']}-{digest}{SUFFIX}"


def read_packed(path: Path, identity: Identity, threads: int) -> PackedWeights | None:
    """The weights of a file, read by several threads into memory of this process; None if it is of no use."""
    try:
        with path.open("rb", buffering=0) as file:
            header, start = _read_header(file.fileno())
            if header["identity"] != dict(identity):
                raise ValueError("it was packed from other files, or otherwise")
            size = int(header["block_bytes"])
            if os.fstat(file.fileno()).st_size != start + size:
                raise ValueError("it isn't whole")
            block = new_block(size)
            _read_block(file.fileno(), start, block, threads)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("packed weights in %s are of no use and are made again: %s", path, error)
        return None
    return PackedWeights(block, {name: Place(*place) for name, place in header["places"].items()})


def write_packed(path: Path, identity: Identity, weights: PackedWeights) -> None:
    """Keep packed weights. A directory that can't be written, or a full disk, only costs a warning."""
    header = json.dumps(
        {"identity": dict(identity), "places": dict(weights.places), "block_bytes": len(weights.block)}
    ).encode()
    front = MAGIC + len(header).to_bytes(4, "little") + hashlib.sha256(header).digest() + header
    front += bytes(-len(front) % ALIGNMENT_BYTES)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb", buffering=0) as file:
            for part in (memoryview(front), weights.block.data):
                _write(file.fileno(), part)
        Path(temporary).replace(path)
    except OSError as error:
        logger.warning("packed weights can't be kept in %s, the next start packs again: %s", path.parent, error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def packed_bytes(cache: Path, revision: str) -> int:
    """What the packed weights of a model take on disk, all forms together."""
    return sum(file.stat().st_size for file in (cache / "packed").glob(f"{revision}-*{SUFFIX}"))


def _read_header(handle: int) -> tuple[dict[str, Any], int]:
    """The checked header, and where the block begins."""
    front = os.pread(handle, 44, 0)
    if front[:8] != MAGIC or len(front) < 44:
        raise ValueError("it is no file of packed weights of this version")
    length = int.from_bytes(front[8:12], "little")
    if length > os.fstat(handle).st_size:
        raise ValueError("its header goes past its end")
    raw = os.pread(handle, length, 44)
    if hashlib.sha256(raw).digest() != front[12:]:
        raise ValueError("its header is damaged")
    header: dict[str, Any] = json.loads(raw)
    return header, -(-(44 + length) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _read_block(handle: int, start: int, block: NDArray[np.uint8], threads: int) -> None:
    def read(at: int) -> None:
        piece = block[at : at + _PIECE_BYTES].data
        while piece:
            count = os.preadv(handle, [piece], start + at)
            if not count:
                raise ValueError("it ends too early")
            piece, at = piece[count:], at + count

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(0, len(block), _PIECE_BYTES)))


def _write(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data[:_PIECE_BYTES]) :]
