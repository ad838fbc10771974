"""The worked example of the documentation, and the script of `examples/`, as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from kernels.custom import CustomOp, op
from kernels.custom.compilers import find_cpp

ROOT = Path(__file__).parents[4]


def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_cpp() is None:
        pytest.skip("there is no C++ compiler")
    text = (ROOT / "docs" / "custom-operations.md").read_text()
    (source,) = re.findall(r"```cuda\n(.*?)```", text, re.DOTALL)
    call = next(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "silu_and_mul.cu" in code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(op, "ARCHITECTURES", ("sm_90",))
    Path("silu_and_mul.cu").write_text(source)
    names: dict[str, object] = {"CustomOp": CustomOp}
    exec(call, names)
    silu_and_mul = names["op"]
    assert isinstance(silu_and_mul, CustomOp)
    gate_up = torch.linspace(-4, 4, 5 * 2 * 48).view(5, 96).bfloat16()
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(silu_and_mul(gate_up), (functional.silu(gate) * up).bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    if find_cpp() is None:
        pytest.skip("there is no C++ compiler")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "custom_gelu.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "torch.library.opcheck: test_schema SUCCESS" in done.stdout
    built_in, custom = (re.search(rf"{name}: +'(\S+)'", done.stdout) for name in ("built-in", "custom"))
    assert built_in is not None
    assert custom is not None
    assert built_in[1] == custom[1]


def test_the_example_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "custom_gelu.py")],
        cwd=tmp_path, env={**os.environ, "CXX": "no-such-compiler"}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "install g++" in done.stderr
    assert "Traceback" not in done.stderr
