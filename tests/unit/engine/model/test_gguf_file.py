"""GGUF files that the `gguf` package wrote, read back."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.model.gguf_file import GGUFFile
from engine.model.gguf_header import CorruptGGUF, GGUFHeader
from engine.model.gguf_weights import GGUFWeights
from engine.model.hf_dir import HFDirectory, HFWeights
from engine.model.spec import UnsupportedModel
from tests.unit.engine.model.gguf_writing import model_metadata, model_tensors, tokenizer_metadata, write_gguf

Save = Callable[..., tuple[Any, Path]]
Kind = gguf.GGMLQuantizationType


def randn(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


class TestHeader:
    def test_metadata_of_every_type(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        scalars = {"uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1, "int32": -(2**31),
                   "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True}  # fmt: skip
        for name, value in scalars.items():
            getattr(writer, f"add_{name}")(f"x.{name}", value)
        writer.add_string("x.string", "naïve ☃")
        arrays = {"x.words": ["a", "", "☃"], "x.ints": [1, -2, 3], "x.floats": [0.5, -1.5], "x.bools": [True, False]}
        for name, values in arrays.items():
            writer.add_array(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        got = GGUFHeader(path).metadata
        expected = {f"x.{name}": value for name, value in scalars.items()} | arrays
        assert got == expected | {"x.string": "naïve ☃", "general.architecture": "llama"}

    def test_agrees_with_the_reader_of_the_package(self, tmp_path: Path) -> None:
        tensors = {"a.weight": randn(5, 64), "b.weight": randn(7), "c.weight": randn(2, 3, 32)}
        path = write_gguf(tmp_path / "m.gguf", tensors, **tokenizer_metadata())
        header, reader = GGUFHeader(path), gguf.GGUFReader(path)
        for field in reader.fields.values():
            if not field.name.startswith("GGUF."):
                assert header.metadata[field.name] == field.contents()
        assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = header.tensors[tensor.name]
            assert (info.start, info.size_bytes, info.type) == (
                tensor.data_offset,
                tensor.n_bytes,
                tensor.tensor_type,
            )

    def test_another_alignment(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_custom_alignment(256)
        for name in ("a", "b"):
            writer.add_tensor(name, randn(3))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        header = GGUFHeader(path)
        assert all(info.start % 256 == 0 for info in header.tensors.values())
        assert np.array_equal(header.stored("b").float32(), randn(3))

    def test_a_file_cut_anywhere_is_refused(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", {"a.weight": randn(4, 32)}, **tokenizer_metadata())
        whole = path.read_bytes()
        data_end = GGUFHeader(path).tensors["a.weight"].start + 4 * 32 * 4
        for length in range(0, data_end, 7):
            path.write_bytes(whole[:length])
            with pytest.raises(CorruptGGUF):
                GGUFHeader(path)

    @pytest.mark.parametrize(
        ("offset", "value", "said"),
        [
            (0, b"GGML", "doesn't begin with 'GGUF'"),
            (4, struct.pack("<I", 1), "version 1"),
            (4, b"\0\0\0\3", "big-endian"),
        ],
    )
    def test_another_kind_of_file_is_refused(self, tmp_path: Path, offset: int, value: bytes, said: str) -> None:
        path = write_gguf(tmp_path / "m.gguf", {})
        data = bytearray(path.read_bytes())
        data[offset : offset + len(value)] = value
        path.write_bytes(data)
        with pytest.raises(CorruptGGUF, match=said):
            GGUFHeader(path)


class TestDequantize:
    @pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q4_0, Kind.Q4_1])
    def test_what_was_quantised_comes_back_within_its_step(
        self, tmp_path: Path, kind: gguf.GGMLQuantizationType
    ) -> None:
        original = randn(6, 64)
        path = write_gguf(tmp_path / "m.gguf", {"a": (gguf.quantize(original, kind), kind)})
        header = GGUFHeader(path)
        assert header.tensors["a"].type == kind
        got = header.stored("a").float32()
        step = {Kind.F32: 0.0, Kind.F16: 2e-3, Kind.BF16: 2e-2, Kind.Q8_0: 2e-2, Kind.Q5_0: 0.15}.get(kind, 0.3)
        assert got.shape == (6, 64)
        assert got.dtype == np.float32
        assert np.abs(got - original).max() <= step

    @pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q3_K, Kind.Q2_K])
    def test_super_blocks_are_laid_out_in_rows(self, tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
        """The package can't quantise to these; any bytes are a valid block, up to their float16 scales."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.random.default_rng(1).integers(0, 60, (3, 2 * block_bytes), dtype=np.uint8)
        got = GGUFHeader(write_gguf(tmp_path / "m.gguf", {"a": (raw, kind)})).stored("a").float32()
        assert got.shape == (3, 2 * block)
        rows = [gguf.dequantize(raw[i : i + 1], kind)[0] for i in range(3)]
        assert np.isfinite(got).all()
        assert np.array_equal(got, np.stack(rows))

    def test_the_result_outlives_the_file(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", {"a": randn(40)})
        values = GGUFHeader(path).stored("a").float32()
        path.write_bytes(b"")
        assert np.array_equal(values, randn(40))
        assert values.flags.writeable


@pytest.mark.parametrize(
    ("family", "architecture", "config"),
    [
        ("Llama", "llama", {"tie_word_embeddings": True}),
        ("Mistral", "llama", {"sliding_window": None}),
        ("Qwen2", "qwen2", {"head_dim": 8}),
        ("Qwen3", "qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_a_converted_model_is_the_original(
    save_random: Save, tmp_path: Path, family: str, architecture: str, config: dict[str, Any]
) -> None:
    model, directory = save_random(family, **config)
    path = write_gguf(
        tmp_path / "m.gguf",
        model_tensors(model.state_dict(), model.config, architecture),
        architecture,
        **model_metadata(model.config, architecture),
        **tokenizer_metadata(),
    )
    file, original = GGUFFile(path), HFDirectory(directory)
    ours, theirs = GGUFWeights(file.header, file.spec), HFWeights(original)
    layer = ["attn_norm", "mlp_norm", "q", "k", "v", "o", "gate", "up", "down"]
    layer += ["q_norm", "k_norm"] if file.spec.qk_norm else []
    layer += ["q.bias", "k.bias", "v.bias"] if file.spec.qkv_bias else []
    names = ["embedding", "norm", *(f"{i}.{part}" for i in range(3) for part in layer)]
    names += [] if file.spec.tied_head else ["head"]
    for name in names:
        assert np.array_equal(ours[name].float32(), theirs[name].float32()), name
    exact = replace(file.spec, architecture=original.spec.architecture, norm_eps=original.spec.norm_eps)
    assert exact == original.spec
    assert file.spec.norm_eps == pytest.approx(original.spec.norm_eps)


def test_rope_factors_are_found(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": randn(12, 32), "rope_freqs.weight": randn(16)}
    metadata = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
                "attention__head_count": 1, "attention__layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", tensors, **{f"llama__{k}": v for k, v in metadata.items()}))
    weights = GGUFWeights(file.header, file.spec)
    assert "rope_factors" in weights
    assert np.array_equal(weights["rope_factors"].float32(), randn(16))
    assert "head" not in weights


def test_a_file_that_is_no_language_model(tmp_path: Path) -> None:
    with pytest.raises(CorruptGGUF, match=r"no tensor token_embd\.weight"):
        _ = GGUFFile(write_gguf(tmp_path / "m.gguf", {"a": randn(4)})).spec


def test_an_architecture_that_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'gemma3'"):
        _ = GGUFFile(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": randn(4, 32)}, "gemma3")).spec
