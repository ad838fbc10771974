"""Finds and loads the compiled library: once for each instruction set, and never at import."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

ISAS = ("amx", "avx512", "avx2", "portable")
"""The instruction sets that the library knows, best first. `HEADRACE_CPU_ISA` names one to use."""
ABI_VERSION = 5
"""What the library has to say of itself: `kAbiVersion` of src/abi.h."""
LIBRARY = Path(__file__).with_name("headrace_cpu.so")


class Unavailable(RuntimeError):
    """The library was not built, or has nothing for this machine."""


class Library:
    """The C functions of the library and the operations for one instruction set.

    `call("name", ...)` calls `headrace_name(ops, ...)`: every operation takes the table of its instruction set first.
    """

    def __init__(self, cdll: ctypes.CDLL, isa: str, ops: int) -> None:
        self.cdll = cdll
        self.isa = isa
        self.ops = ctypes.c_void_p(ops)

    def call(self, operation: str, *arguments: object) -> None:
        """Call an operation that returns nothing; integers must come as ctypes values of the right width."""
        getattr(self.cdll, f"headrace_{operation}")(self.ops, *arguments)


class Team:
    """Threads that share an operation; the caller is one of them. Close it, or use it in a `with`."""

    def __init__(self, library: Library, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a team needs at least one thread, not {threads}")
        self.library = library
        self.threads = threads
        self.handle = ctypes.c_void_p(library.cdll.headrace_team_create(threads))
        if not self.handle:
            raise RuntimeError(f"this process can't start {threads} threads: ask for fewer, or allow it more")

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        if self.handle:
            self.library.cdll.headrace_team_destroy(self.handle)
            self.handle = ctypes.c_void_p()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@cache
def _open() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise Unavailable(
            f"The CPU library {LIBRARY} was not built: there was no C++17 compiler when Headrace was installed. "
            "Install g++ and run 'pip install' again."
        )
    try:
        cdll = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise Unavailable(f"The CPU library {LIBRARY} cannot be loaded: {error}") from error
    if not hasattr(cdll, "headrace_abi_version") or cdll.headrace_abi_version() != ABI_VERSION:
        raise Unavailable(f"The CPU library {LIBRARY} was built from other sources. Run 'pip install' again.")
    cdll.headrace_ops.restype = ctypes.c_void_p
    cdll.headrace_ops.argtypes = [ctypes.c_char_p]
    cdll.headrace_team_create.restype = ctypes.c_void_p
    cdll.headrace_team_create.argtypes = [ctypes.c_int]
    cdll.headrace_team_destroy.restype = None
    cdll.headrace_team_destroy.argtypes = [ctypes.c_void_p]
    for name in ("packed_bytes", "read_bytes", "multiply_registers"):
        getattr(cdll, f"headrace_{name}").restype = ctypes.c_int64
    return cdll


@cache
def _load(isa: str) -> Library:
    cdll = _open()
    if isa not in ISAS:
        raise Unavailable(f"There is no instruction set '{isa}': choose one of {', '.join(ISAS)}")
    ops = cdll.headrace_ops(isa.encode())
    if not ops:
        raise Unavailable(f"This machine lacks what the library's {isa} path needs")
    return Library(cdll, isa, ops)


def load(isa: str | None = None) -> Library:
    """The library for `isa`, else for HEADRACE_CPU_ISA, else the best for this machine; raises Unavailable."""
    isa = isa or os.environ.get("HEADRACE_CPU_ISA")
    return _load(isa) if isa else _load(available()[0])


@cache
def available() -> tuple[str, ...]:
    """The instruction sets that this machine and this build have, best first; raises Unavailable without a library."""
    cdll = _open()
    return tuple(isa for isa in ISAS if cdll.headrace_ops(isa.encode()))
