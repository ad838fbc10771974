"""Files from strangers: whatever is in them, reading ends in a clear error, soon, and takes little memory."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model.gguf_file import GGUFFile
from engine.model.gguf_header import CorruptGGUF, GGUFHeader
from engine.model.hf_dir import INDEX, HFDirectory
from engine.model.safetensors_file import CorruptSafetensors, SafetensorsFile
from engine.model.spec import UnsupportedModel
from tests.unit.engine.model.gguf_writing import tokenizer_metadata, write_gguf

CLEAR = (CorruptGGUF, CorruptSafetensors, UnsupportedModel)
MOST_BYTES = 8 * 2**20
many = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])

LLAMA: dict[str, Any] = {
    "llama__block_count": 1, "llama__context_length": 64, "llama__embedding_length": 32,
    "llama__feed_forward_length": 64, "llama__attention__head_count": 2, "llama__attention__head_count_kv": 1,
    "llama__attention__layer_norm_rms_epsilon": 1e-5, "llama__rope__freq_base": 10000.0,
    "llama__vocab_size": 12,
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model with everything in its header."""
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    tensors = {"token_embd.weight": np.zeros((12, 32), np.float32), "output_norm.weight": np.zeros(32, np.float32)}
    return write_gguf(path, tensors, **LLAMA, **tokenizer_metadata()).read_bytes()


def read_gguf(path: Path, data: bytes) -> None:
    """Read everything that a worker reads before it loads weights; fails for any error that isn't a clear one."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        file = GGUFFile(path)
        for name in file.header.tensors:
            file.header.stored(name)
        assert file.spec.layers >= 0
        assert file.text.vocab_size >= 0
    except CLEAR:
        pass
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < MOST_BYTES


def test_the_good_file_is_read(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(good)
    assert GGUFFile(tmp_path / "m.gguf").spec.layers == 1


@many
@given(data=st.data())
def test_a_gguf_file_with_some_bytes_changed(good: bytes, tmp_path: Path, data: st.DataObject) -> None:
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 8))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8]))
        changed[at : at + len(new)] = new
    read_gguf(tmp_path / "m.gguf", bytes(changed))


@many
@given(tail=st.binary(max_size=200), counts=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)))
def test_noise_behind_a_gguf_head(tmp_path: Path, tail: bytes, counts: tuple[int, int]) -> None:
    read_gguf(tmp_path / "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, *counts) + tail)


odd = st.none() | st.booleans() | st.integers(0, 2**32 - 1) | st.floats(width=32) | st.text(max_size=5)


@many
@given(
    name=st.sampled_from(sorted(LLAMA) + sorted(tokenizer_metadata())),
    value=odd | st.lists(st.text(max_size=3), min_size=1),
)
def test_a_gguf_file_whose_metadata_make_no_sense(tmp_path: Path, name: str, value: Any) -> None:
    metadata = {**LLAMA, **tokenizer_metadata(), name: value}
    if value is None:
        del metadata[name]
    path = tmp_path / "w.gguf"
    write_gguf(path, {"token_embd.weight": np.zeros((12, 32), np.float32)}, **metadata)
    read_gguf(tmp_path / "m.gguf", path.read_bytes())


@pytest.mark.parametrize("alignment", [0, 2**32 - 1])
def test_an_odd_alignment(tmp_path: Path, alignment: int) -> None:
    entry = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, alignment)
    read_gguf(tmp_path / "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)


def test_lists_in_lists_end_before_the_stack_does(tmp_path: Path) -> None:
    nested = struct.pack("<Q", 1) + b"x" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested)
    with pytest.raises(CorruptGGUF, match="deep"):
        GGUFHeader(tmp_path / "m.gguf")


json_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
entry = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "I64"]) | json_value, "shape": st.lists(st.integers(-2, 5)) | json_value,
     "data_offsets": st.lists(st.integers(-2, 70), min_size=2, max_size=2) | json_value}
)  # fmt: skip


@many
@given(
    header=st.dictionaries(st.text(max_size=4), entry | json_value, max_size=3) | json_value, raw=st.binary(max_size=64)
)
def test_a_safetensors_file_with_any_header(tmp_path: Path, header: Any, raw: bytes) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw)
    try:
        file = SafetensorsFile(path)
        for name in file.names:
            file[name]
    except CLEAR:
        pass


def test_a_safetensors_header_that_is_nested_without_end(tmp_path: Path) -> None:
    text = b"[" * 200_000
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CorruptSafetensors):
        SafetensorsFile(tmp_path / "m.safetensors")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def spec_and_tensors(model: Path) -> object:
    directory = HFDirectory(model)
    return [SafetensorsFile(file) for file in directory.tensor_files.values()], directory.spec, directory.text


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "m.gguf", "tokenizer.json", "config.json"])
def test_no_file_of_a_model_is_unpickled(tmp_path: Path, name: str) -> None:
    """Whatever it is called. Code that lies beside a model is not run either."""
    model, bomb = tmp_path / "model", tmp_path / "bomb"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "evil.Model"}, "model_type": "llama"}))
    (model / "evil.py").write_text(f"import os; os.mkdir({str(bomb)!r})")
    (model / name).write_bytes(pickle.dumps(Bomb(bomb)))
    read = GGUFFile if name.endswith("gguf") else spec_and_tensors
    with pytest.raises((*CLEAR, ValueError, LookupError)):
        read(model / name if name.endswith("gguf") else model)
    assert not bomb.exists()


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin"])
def test_an_index_names_files_of_its_own_directory_alone(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(UnsupportedModel, match="its own directory"):
        _ = HFDirectory(tmp_path).tensor_files
