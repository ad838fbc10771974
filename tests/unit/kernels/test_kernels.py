"""The package itself: its name's other owner, what its import pulls in, and the registry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels.reference import ReferenceKernels
from kernels.registry import get_kernels


def test_nobody_else_owns_the_name_here() -> None:
    kernels.ensure_ours()


def test_the_other_package_of_this_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "kernels-0.10.2.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.10.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(kernels.NameClash, match=r"'kernels' 0\.10\.2 of Hugging Face.*pip uninstall kernels"):
        kernels.ensure_ours()


def test_the_package_and_its_plain_parts_import_no_torch() -> None:
    code = "import sys, kernels, kernels.sampling; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_cpu_is_served() -> None:
    assert isinstance(get_kernels(torch.device("cpu")), ReferenceKernels)


def test_a_gpu_is_served_by_triton_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert get_kernels(torch.device("cuda:0")).name == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert get_kernels(torch.device("cuda:0")).name == "reference"


def test_an_implementation_that_is_asked_for_is_the_one_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    gpu, cpu = torch.device("cuda:0"), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert get_kernels(gpu, choice="torch").name == "reference"
    assert get_kernels(gpu, choice="triton").name == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"kernels='triton' can't be had: this GPU is older .* Set kernels to auto or"):
        get_kernels(gpu, choice="triton")
    with pytest.raises(ValueError, match="the device is cpu, and they need a GPU"):
        get_kernels(cpu, choice="triton")
    monkeypatch.setattr("kernels.registry.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton isn't installed"):
        get_kernels(gpu, choice="triton")


def test_triton_is_imported_for_a_gpu_alone() -> None:
    code = (
        "import sys, torch\nfrom kernels.registry import get_kernels\nget_kernels(torch.device('cpu'))\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
