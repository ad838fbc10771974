"""Files that the `safetensors` package wrote, read back."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.model.safetensors_file import CorruptSafetensors, SafetensorsFile
from engine.model.spec import UnsupportedModel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_reads_as_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(5, 7).to(dtype), "b": torch.randn(3).to(dtype), "c": torch.randn(2, 0).to(dtype)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert sorted(file.names) == ["a", "b", "c"]
    for name, tensor in tensors.items():
        assert file[name].shape == tuple(tensor.shape)
        assert np.array_equal(file[name].float32(), tensor.float().numpy())


def test_a_type_that_no_weight_has_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedModel, match=r"tensor a .* has the type I64"):
        _ = SafetensorsFile(tmp_path / "m.safetensors")["a"]


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.randn(4, 4)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptSafetensors):
            SafetensorsFile(path)


def written(path: Path, header: object) -> Path:
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(16))
    return path


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": {"dtype": "F32", "shape": [4]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 17]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [-1, 15]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 4]}},
        {"a": None},
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(CorruptSafetensors, match="not a readable file"):
        SafetensorsFile(written(tmp_path / "m.safetensors", header))


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
        ' "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [4], "shape": [4], "data_offsets": [0, 16]}}',
    ],
)
def test_a_name_that_is_there_twice_is_refused(tmp_path: Path, header: str) -> None:
    """The last one would have counted, whichever was meant."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(16))
    with pytest.raises(CorruptSafetensors, match="is there more than once"):
        SafetensorsFile(path)


def test_data_of_another_size_than_the_shape_is_refused(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}
    with pytest.raises(CorruptSafetensors, match="doesn't fit its shape"):
        _ = SafetensorsFile(written(tmp_path / "m.safetensors", header))["a"]
