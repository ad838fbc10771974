"""The same source, compiled for the CPU and run there with every access checked (`emulator.h`, `cuda_names.h`)."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path

from torch import Tensor

from kernels.custom.compilers import STANDARD, cuda_includes, run_compiler
from kernels.custom.errors import EmulationError, SignatureError
from kernels.custom.signature import Number, Parameter, Signature
from kernels.custom.source import Source

HEADER = Path(__file__).with_name("cuda_names.h")
HOST = Path(__file__).with_name("host")
"""What headers of CUDA may lack."""
MOST_THREADS = 1024
"""Of a block, on every GPU."""
FLAGS = (
    f"-std={STANDARD}", "-O2", "-g1", "-w", "-shared", "-fPIC", "-fwrapv", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE",
    "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error",
)  # fmt: skip

_ENTRY = """
#line 1 "emulator"
namespace {{ void headrace_body(void* const* arguments) {{ headrace::call(&{name}, arguments); }} }}
extern "C" int32_t headrace_sizes(int32_t* sizes, int32_t most) {{
  return headrace::parameter_sizes(&{name}, sizes, most);
}}
extern "C" void headrace_run(const headrace::Tensor* tensors, int32_t tensor_count, void** const* pointers,
                             void* const* arguments, uint32_t blocks, uint32_t threads, int64_t shared_bytes,
                             headrace::Report* report) {{
  headrace::run(headrace_body, tensors, tensor_count, pointers, arguments, blocks, threads, shared_bytes, report);
}}
"""


class _Kind(IntEnum):
    FINE, ACCESS, BARRIER, TRAP, OVERWRITTEN, MEMORY, DIVISION, ASSERTION = range(8)


class _Report(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "writes", "tensor", "line", "other_line")),
        ("block", ctypes.c_uint32), ("thread", ctypes.c_uint32),
        ("offset_bytes", ctypes.c_int64), ("code_offset", ctypes.c_uint64), ("assertion", ctypes.c_char_p),
    )  # fmt: skip
    kind: int
    writes: int
    tensor: int
    line: int
    other_line: int
    block: int
    thread: int
    offset_bytes: int
    code_offset: int
    assertion: bytes


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("read_only", ctypes.c_int32))


class Emulator:
    """A kernel as a function of the CPU. Calls from several threads run one after the other."""

    def __init__(self, source: Source, signature: Signature, cpp: str) -> None:
        """Compile it with the C++ compiler `cpp`. Raises CompileFailed, or SignatureError if its layout differs."""
        self._source = source
        self._signature = signature
        folder = tempfile.mkdtemp(prefix="headrace-op-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        code, self._library_path = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        text = f'#line 1 "{source.path.name}"\n{source.host_text}{_ENTRY.format(name=source.kernel.name)}'
        code.write_text(text, encoding="utf-8")
        includes = [f"-I{source.path.parent}", *(f"-isystem{found}" for found in cuda_includes()), f"-idirafter{HOST}"]
        run_compiler(
            [cpp, *FLAGS, *includes, "-include", str(HEADER), str(code), "-o", str(self._library_path)], source.path
        )
        self._library = ctypes.CDLL(str(self._library_path))
        self._library.headrace_run.restype = None
        self._check_sizes()

    def run(
        self, tensors: Sequence[Tensor], numbers: Mapping[str, Number], blocks: int, threads: int, shared_bytes: int
    ) -> None:
        """Run it over contiguous CPU tensors, inputs and outputs in the signature's order. Raises EmulationError."""
        shaped = [number for number, one in enumerate(self._signature.parameters) if one.shape is not None]
        held = [(tensor, self._signature.parameters[i]) for tensor, i in zip(tensors, shaped, strict=True)]
        values = self._signature.arguments([0] * len(held), numbers)  # the addresses are the emulator's own copies
        table = (_Tensor * len(held))(
            *[_Tensor(tensor.data_ptr(), tensor.nbytes, int(one.const)) for tensor, one in held]
        )
        pointers = (ctypes.c_void_p * len(shaped))(*[ctypes.addressof(values[i]) for i in shaped])
        arguments = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        report = _Report()
        self._library.headrace_run(
            table, ctypes.c_int32(len(held)), pointers, arguments, ctypes.c_uint32(blocks), ctypes.c_uint32(threads),
            ctypes.c_int64(shared_bytes), ctypes.byref(report),
        )  # fmt: skip
        if report.kind != _Kind.FINE:
            raise EmulationError(self._describe(report, held, shared_bytes))

    def _check_sizes(self) -> None:
        wanted = [one.size_bytes for one in self._signature.parameters]
        sizes = (ctypes.c_int32 * len(wanted))()
        count = self._library.headrace_sizes(sizes, ctypes.c_int32(len(wanted)))
        if count != len(wanted) or list(sizes) != wanted:
            raise SignatureError(
                f"{self._source.kernel.name} has {count} parameters, of {list(sizes)} bytes, and the signature's "
                f"{len(wanted)} are of {wanted}: {self._signature}"
            )

    def _describe(self, report: _Report, held: Sequence[tuple[Tensor, Parameter]], shared_bytes: int) -> str:
        name, where = self._source.kernel.name, f"thread {report.thread} of block {report.block}"
        place = self._source.path.name
        if report.kind == _Kind.MEMORY:
            return f"{place}: no memory to run {name} on the CPU"
        if report.kind == _Kind.BARRIER:
            others = f"line {report.line}" + (
                f" and line {report.other_line}" if report.other_line != report.line else ""
            )
            return (
                f"{place}: the threads of block {report.block} never meet: those that wait do so at {others}. "
                f"All threads of {name} must reach the same barrier"
            )
        if report.kind == _Kind.OVERWRITTEN:
            return f"{place}: {name} wrote {self._target(report, held, shared_bytes)}"
        if report.kind == _Kind.ASSERTION:
            return f"{place}:{report.line}: {where} failed its assertion: {report.assertion.decode()}"
        place += f":{line}" if (line := self._line(report.code_offset)) is not None else ""
        if report.kind == _Kind.DIVISION:
            return f"{place}: {where} divided an integer by zero, or the lowest one by -1; a GPU makes any number of it"
        if report.kind == _Kind.TRAP:
            return f"{place}: {where} did what has no meaning, such as an index outside of an array of fixed size"
        did = {1: "wrote", 0: "read"}.get(report.writes, "touched")
        return f"{place}: {where} {did} {self._target(report, held, shared_bytes)}"

    def _target(self, report: _Report, held: Sequence[tuple[Tensor, Parameter]], shared_bytes: int) -> str:
        if report.tensor == -2:
            return f"byte {report.offset_bytes} of the dynamic shared memory, which has {shared_bytes}"
        if report.tensor == -3:
            return "past the 256 KiB that it has for local variables here"
        if report.tensor < 0:
            return "an address that is in none of its tensors"
        tensor, parameter = held[report.tensor]
        if 0 <= report.offset_bytes < tensor.nbytes:
            return f"to {parameter.name}, which the signature says is only read (const)"
        element = report.offset_bytes // tensor.element_size()
        return f"element {element} of {parameter.name}, which has {tensor.numel()}"

    def _line(self, code_offset: int) -> int | None:
        """The line of the source that an instruction comes from, if binutils are there to tell."""
        tool = shutil.which("addr2line")
        if tool is None:
            return None
        told = subprocess.run(  # noqa: S603
            [tool, "-i", "-e", str(self._library_path), hex(code_offset)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return next(self._lines_of(told.stdout), None)

    def _lines_of(self, frames: str) -> Iterator[int]:
        for match in re.finditer(r"^(?P<file>.*):(?P<line>\d+)", frames, re.MULTILINE):
            if Path(match["file"]).name == self._source.path.name:
                yield int(match["line"])
