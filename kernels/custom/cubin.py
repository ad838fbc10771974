"""Reads compiled kernels (cubin, an ELF file): their parameters, registers, stack and shared memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_INFO = ".nv.info"
_SHARED = ".nv.shared."
_SIZED_VALUE = 4
"""Format of an attribute whose payload follows it; that of all others is in its head."""
_FRAME_SIZE, _KPARAM_INFO, _REGISTER_COUNT = 0x11, 0x17, 0x2F


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What the compiler's own records say of a kernel."""

    symbol: str
    parameters: tuple[tuple[int, int], ...]
    """(offset, size) of each in bytes, in the kernel's order."""
    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread."""
    shared_bytes: int
    """Of a block, without what is asked for at the launch."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    data: bytes
    size: int


def read_cubin(cubin: bytes) -> list[CompiledKernel]:
    """The kernels in it."""
    sections = {section.name: section for section in _sections(cubin)}
    symbols = _symbols(sections)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, payload in _attributes(sections[_INFO].data if _INFO in sections else b""):
        if attribute in (_REGISTER_COUNT, _FRAME_SIZE):
            symbol, value = struct.unpack("<II", payload)
            (registers if attribute == _REGISTER_COUNT else frames)[symbols[symbol]] = value
    kernels: list[CompiledKernel] = []
    for name, section in sections.items():
        if name.startswith(f"{_INFO}."):
            symbol_name = name.removeprefix(f"{_INFO}.")
            shared = sections.get(f"{_SHARED}{symbol_name}")
            kernels.append(
                CompiledKernel(
                    symbol_name,
                    _parameters(section.data),
                    registers.get(symbol_name, 0),
                    frames.get(symbol_name, 0),
                    shared.size if shared is not None else 0,
                )
            )
    return kernels


def is_symbol_of(symbol: str, name: str) -> bool:
    """Whether a symbol is that of the function `name` outside of any namespace."""
    return symbol == name or symbol.startswith(f"_Z{len(name)}{name}")


def _parameters(info: bytes) -> tuple[tuple[int, int], ...]:
    found: dict[int, tuple[int, int]] = {}
    for attribute, payload in _attributes(info):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack("<IHHI", payload)
            found[ordinal] = (offset, flags >> 18)
    return tuple(found[ordinal] for ordinal in sorted(found))


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED_VALUE:
            yield attribute, info[at : at + size]
            at += size


def _sections(elf: bytes) -> Iterator[_Section]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("a cubin is a 64-bit ELF file")
    (first,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [_SECTION.unpack_from(elf, first + i * entry_bytes) for i in range(count)]
    strings = heads[names][4]
    for name, kind, _, _, offset, size, *_ in heads:
        no_bits = kind == 8
        yield _Section(_string(elf, strings + name), b"" if no_bits else elf[offset : offset + size], size)


def _symbols(sections: dict[str, _Section]) -> list[str]:
    table, strings = sections[".symtab"].data, sections[".strtab"].data
    return [_string(strings, entry[0]) for entry in _SYMBOL.iter_unpack(table)]


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()
