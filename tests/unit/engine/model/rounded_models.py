"""Copies of saved models whose layers' matrices have been through a quantised form, as floats again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, float32

from kernels.weights import Bits, QuantisedWeight

MATRIX = re.compile(r".*\.(?:layers|h)\.\d+\..*(?:_proj|\.w[123]|c_attn|c_proj|c_fc)\.weight")
"""Of a layer or of an expert; neither a router nor a norm."""


def save_rounded(path: Path, bits: Bits) -> Path:
    """The directory of the copy: what a model of `path` in so many bits computes with."""
    copy = path.with_name(f"{path.name}-{bits}")
    shutil.copytree(path, copy)
    file = copy / "model.safetensors"
    tensors = load_file(file)
    changed = {name: _rounded(name, tensor, bits) for name, tensor in tensors.items() if MATRIX.fullmatch(name)}
    assert changed
    file.unlink()
    save_file(tensors | changed, file, {"format": "pt"})
    return copy


def _rounded(name: str, weight: Tensor, bits: Bits) -> Tensor:
    transposed = ".h." in name  # GPT-2's matrices have their inputs first
    matrix = weight.T if transposed else weight
    restored = QuantisedWeight.rounded(matrix, bits).restored(float32)
    return restored.T.contiguous() if transposed else restored
