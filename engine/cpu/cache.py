"""Packed weights on disk, so that they are packed once: a JSON header and the block as it lies in memory.

    8 bytes   magic and version of this file's form
    4 bytes   length of the header
    32 bytes  SHA-256 of the header
    header    JSON: what the weights were packed from and how, the model's name, the places of the arrays, the
              block's size, and a checksum (CRC-32) of each 8 MiB of it
    padding   up to a multiple of 4096
    block

A file that isn't whole, or was packed from or by something else, is as good as none. It is written
beside its place and renamed, so readers see all of it or nothing. Whoever writes one removes those
that nobody will read again: of the same model's earlier files, of an earlier packing, and what a
process left that was killed while it wrote.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cpu.packed import ALIGNMENT_BYTES, PackedWeights, Place, new_block

logger = logging.getLogger(__name__)

_KIND = b"hrpack"
MAGIC = _KIND + b"02"
_PIECE_BYTES = 8 * 2**20
SUFFIX = ".packed"
ABANDONED_S = 3600.0
"""Age at which a file that was never finished is taken to be a dead process's."""
MOST_PRUNED = 256
"""Files that are looked at when one is written."""

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
            _read_block(file.fileno(), start, block, header["checksums"], threads)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("packed weights in %s are of no use and are made again: %s", path, error)
        return None
    return PackedWeights(block, {name: Place(*place) for name, place in header["places"].items()})


def write_packed(path: Path, identity: Identity, weights: PackedWeights, model: str) -> None:
    """Keep packed weights of the model of this name, and remove what they replace.

    A directory that can't be written, or a full disk, only costs a warning.
    """
    header = json.dumps(
        {
            "identity": dict(identity),
            "model": model,
            "places": dict(weights.places),
            "block_bytes": len(weights.block),
            "checksums": [zlib.crc32(piece) for piece in _pieces(weights.block)],
        }
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
            os.fsync(file.fileno())  # or a machine that loses power may keep the name and not the content
        Path(temporary).replace(path)
        _prune(path, identity, model)
    except OSError as error:
        logger.warning("packed weights can't be kept in %s, the next start packs again: %s", path.parent, error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def packed_bytes(cache: Path, revision: str) -> int:
    """What the packed weights of a model take on disk, all forms together."""
    return sum(file.stat().st_size for file in (cache / "packed").glob(f"{revision}-*{SUFFIX}"))


def _prune(path: Path, identity: Identity, model: str) -> None:
    """Remove what the newly written file replaces, and what dead processes left."""
    for file in islice(path.parent.iterdir(), MOST_PRUNED):
        try:
            if file.name.startswith("."):
                stale = f"{SUFFIX}." in file.name and time.time() - file.stat().st_mtime > ABANDONED_S
            else:
                stale = file.suffix == SUFFIX and file != path and _is_replaced(file, identity, model)
            if stale:
                logger.info("%s is of no use any more and is removed", file)
                file.unlink()
        except OSError as error:  # another process may have been faster
            logger.info("%s stays: %s", file, error)


def _is_replaced(file: Path, identity: Identity, model: str) -> bool:
    """Whether a file has weights of the same model in another revision, or of the same files in an earlier form."""
    try:
        with file.open("rb", buffering=0) as opened:
            front = os.pread(opened.fileno(), len(MAGIC), 0)
            if front.startswith(_KIND) and front < MAGIC:
                return True
            header, _ = _read_header(opened.fileno())
        other = header["identity"]
        if other["revision"] != identity["revision"]:
            return bool(header["model"] == model)
        return any(other[name] < identity[name] for name in ("packing", "recipe"))
    except (ValueError, KeyError, TypeError):
        return False


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


def _pieces(block: NDArray[np.uint8]) -> Iterator[memoryview]:
    return (block[at : at + _PIECE_BYTES].data for at in range(0, len(block), _PIECE_BYTES))


def _read_block(handle: int, start: int, block: NDArray[np.uint8], checksums: Sequence[int], threads: int) -> None:
    def read(number: int, piece: memoryview, checksum: int) -> None:
        left, at = piece, start + number * _PIECE_BYTES
        while left:
            count = os.preadv(handle, [left], at)
            if not count:
                raise ValueError("it ends too early")
            left, at = left[count:], at + count
        if zlib.crc32(piece) != checksum:
            raise ValueError("its weights are damaged")

    pieces = list(_pieces(block))
    if len(pieces) != len(checksums):
        raise ValueError("its checksums are those of another block")
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(len(pieces)), pieces, checksums))


def _write(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data[:_PIECE_BYTES]) :]
