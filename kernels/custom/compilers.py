"""The compilers that may be there: nvcc, else NVRTC from NVIDIA's wheel; for the CPU, a C++ compiler."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from kernels.custom.errors import CompileFailed

TIMEOUT_S = 300.0
STANDARD = "c++17"


@dataclass(frozen=True, slots=True)
class Built:
    """A cubin and what the compiler said about it."""

    cubin: bytes
    log: str


class Compiler(Protocol):
    """Makes a cubin of a CUDA source."""

    def compile(self, path: Path, architecture: str, options: Sequence[str]) -> Built:
        """For `architecture` (sm_90). Raises CompileFailed with the first error."""
        ...


@dataclass(frozen=True, slots=True)
class Nvcc:
    """The compiler of the CUDA toolkit."""

    nvcc: str

    def compile(self, path: Path, architecture: str, options: Sequence[str]) -> Built:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            command = [self.nvcc, "-cubin", f"-arch={architecture}", f"-std={STANDARD}", "-O3", "-Xptxas", "-v"]
            log = run_compiler([*command, *options, "-o", str(cubin), str(path)], path)
            return Built(cubin.read_bytes(), log)


@dataclass(frozen=True, slots=True)
class Nvrtc:
    """NVIDIA's compiler as a library, which needs no toolkit."""

    library: Path

    def compile(self, path: Path, architecture: str, options: Sequence[str]) -> Built:
        nvrtc = _load_nvrtc(self.library)
        program = ctypes.c_void_p()
        source = path.read_bytes()
        created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, path.name.encode(), 0, None, None)
        if created != 0:
            raise CompileFailed(f"{path.name}: NVRTC can't begin (error {created})")
        try:
            flags = [
                f"--gpu-architecture={architecture}",
                f"--std={STANDARD}",
                "--ptxas-options=-v",
                f"-I{path.parent}",
            ]
            flags += [f"-I{folder}" for folder in cuda_includes()]
            encoded = [flag.encode() for flag in [*flags, *options]]
            done = nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
            log = _take(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
            if done != 0:
                raise CompileFailed(first_error(log, path) or f"{path.name}: NVRTC failed (error {done})")
            return Built(_take(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log)
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def find_compiler() -> Compiler | None:
    """nvcc from the path or the toolkit that CUDA_HOME or CUDA_PATH names, else NVRTC, else None."""
    nvcc = find_nvcc()
    if nvcc is not None:
        return Nvcc(nvcc)
    library = next((found for root in _wheels() for found in sorted(root.glob("*/lib/libnvrtc.so.*"))), None)
    return Nvrtc(library) if library is not None else None


def find_nvcc() -> str | None:
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    return shutil.which("nvcc") or next(
        (found for home in homes if home and (found := shutil.which("nvcc", path=str(Path(home, "bin"))))), None
    )


def find_cpp() -> str | None:
    """The C++ compiler that CXX names, else g++."""
    return shutil.which(os.environ.get("CXX") or "g++")


def cuda_includes() -> Iterator[Path]:
    """Folders with CUDA's headers, the best first: the toolkit's, the wheels', Triton's."""
    nvcc = find_nvcc()
    if nvcc is not None:
        yield from _toolkit_includes(nvcc)
    for root in _wheels():
        yield from (found.parent for found in sorted(root.glob("*/include/cuda_bf16.h")))
    site = Path(sysconfig.get_path("purelib"))
    yield from (found.parent for found in site.glob("triton/backends/nvidia/include/cuda_bf16.h"))


@cache
def _toolkit_includes(nvcc: str) -> tuple[Path, ...]:
    told = subprocess.run(  # noqa: S603
        [nvcc, "--dryrun", "-cubin", "-x", "cu", os.devnull, "-o", os.devnull],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    top = re.search(r"^#\$ TOP=(.+)$", told.stderr, re.MULTILINE)
    folder = Path(top[1].strip(), "include") if top else None
    return (folder.resolve(),) if folder is not None and Path(folder, "cuda_bf16.h").exists() else ()


def _wheels() -> list[Path]:
    """Where NVIDIA's wheels lie."""
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return [root for place in sorted(places) if (root := Path(place, "nvidia")).is_dir()]


def run_compiler(command: Sequence[str], path: Path) -> str:
    """What the compiler printed. Raises CompileFailed with its first error."""
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise CompileFailed(f"{path.name}: {Path(command[0]).name} took more than {TIMEOUT_S:.0f} s") from error
    log = done.stdout + done.stderr
    if done.returncode != 0:
        raise CompileFailed(first_error(log, path) or f"{path.name}: {command[0]} ended with {done.returncode}: {log}")
    return log


def first_error(log: str, path: Path) -> str | None:
    """The first line with an error, and the file's name alone for its path: `my_gelu.cu(3): error: ...`."""
    lines = [line.strip() for line in log.splitlines() if re.search(r"\berror\b", line, re.IGNORECASE)]
    if not lines:
        return None
    line = lines[0].replace(str(path), path.name)
    return line if line.startswith(path.name) else f"{path.name}: {line}"


@cache
def _load_nvrtc(library: Path) -> ctypes.CDLL:
    for builtins in sorted(library.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # it would look for this on the loader's path alone
    return ctypes.CDLL(str(library))


def _take(size_of: Callable[..., int], content_of: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    content_of(program, buffer)
    return buffer.raw
