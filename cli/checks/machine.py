"""This machine: compiler, GPU, limits, ports, and what else is installed."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import kernels
from cli.checks.finding import Finding, Reporter
from cli.config import strays
from cli.instance import running
from cli.ports import is_free
from kernels import NameClash, ensure_ours
from kernels.cpu.library import Unavailable, available
from settings import Settings

machine = Reporter("machine")
MIN_OPEN_FILES = 4096


def check_machine(settings: Settings) -> Iterator[Finding]:
    yield machine.ok(f"Python {sys.version.split()[0]}")
    for check in (_name_clash, _compiler, _library, _gpu):
        yield check()
    for stray in strays():
        yield machine.warn(stray.message, stray.advice)
    yield from _environment()
    yield from _limits()
    yield from _ports(settings)


def _name_clash() -> Finding:
    try:
        ensure_ours()
    except NameClash as clash:
        return machine.fail(str(clash), "pip uninstall kernels")
    return machine.ok("no other package is called `kernels`")


def _compiler() -> Finding:
    compiler = os.environ.get("CXX") or "c++"
    path = shutil.which(compiler)
    if path is None:
        return machine.warn(
            f"no C++ compiler (`{compiler}`): the CPU library can't be built here",
            "install one: apt-get install g++, or set CXX",
        )
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    if answer.returncode != 0:
        return machine.fail(f"`{path} --version` fails", "repair the compiler, or set CXX")
    return machine.ok(f"compiler: {answer.stdout.splitlines()[0] if answer.stdout else path}")


def _library() -> Finding:
    """Whether models on a CPU run on the compiled library."""
    try:
        return machine.ok(f"CPU library: {available()[0]}")
    except Unavailable as why:
        return machine.warn(
            f"on a CPU torch serves, several times slower: {why}", f"with a compiler at hand: {_rebuild()}"
        )


def _rebuild() -> str:
    """The command that compiles the library where this installation came from."""
    root = Path(kernels.__file__).parents[1]
    if (root / "setup.py").exists():
        return f"{sys.executable} -m pip install --no-deps -e {root}"
    return f"{sys.executable} -m pip install --no-deps --force-reinstall PATH, the checkout's"


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return machine.ok(f"PyTorch {torch.__version__} sees {', '.join(names)}")
    if shutil.which("nvidia-smi"):
        return machine.warn(
            f"there is an NVIDIA driver here, but PyTorch {torch.__version__} sees no GPU",
            "install the CUDA build of PyTorch that fits the driver; look at CUDA_VISIBLE_DEVICES",
        )
    return machine.ok(f"PyTorch {torch.__version__}, no GPU")


def _environment() -> Iterator[Finding]:
    """Variables that change what CUDA and NCCL do."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME"):
        if name in os.environ:
            yield machine.ok(f"{name}={os.environ[name]}")


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        yield machine.warn(
            f"a process may open only {soft} files; each waiting HTTP client takes one", f"ulimit -n {MIN_OPEN_FILES}"
        )
    else:
        yield machine.ok(f"open files: up to {soft}")
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    if overcommit.exists() and overcommit.read_text().strip() == "2":
        yield machine.warn(
            "vm.overcommit_memory is 2: the KV pool and the broker's background writes may be refused memory",
            "sysctl vm.overcommit_memory=1 (or 0)",
        )


def _ports(settings: Settings) -> Iterator[Finding]:
    """Whether what would start here could listen. A running instance holds its own ports."""
    if running(settings.home) is not None:
        yield machine.ok(f"`headrace up` runs in {settings.home}")
        return
    wanted = {
        "API": (settings.api.port, "/healthz"),
        "Flower": (settings.flower_port, "/healthcheck"),
        "metrics": (settings.worker.metrics_port, "/livez"),
    }
    for name, (port, path) in wanted.items():
        if port == 0 or is_free(port):
            yield machine.ok(f"port {port} ({name}) is free")
        elif _serves(port, path):
            yield machine.ok(f"port {port} ({name}) has its service: {path} answers")
        else:
            yield machine.warn(
                f"port {port} ({name}) is taken", "`headrace up` would take a free one; a service alone would fail"
            )


def _serves(port: int, path: str) -> bool:
    """Whether what listens there is ours: a stranger knows no such path. A worker may answer 503."""
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return int(answer.status) == 200
    except HTTPError as error:
        return error.code == 503 and error.headers.get_content_type() == "application/json"
    except (OSError, HTTPException):
        return False
