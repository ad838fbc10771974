from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kernels.cpu import convert
from kernels.cpu.buffers import aligned_bytes, huge_bytes
from kernels.cpu.library import Team, Unavailable, load
from kernels.cpu.packing import Format, Matrix, Packed, Source, pack, packed_bytes, unpack_row


@pytest.fixture
def team() -> Iterator[Team]:
    try:
        library = load()
    except Unavailable as why:
        pytest.skip(str(why))
    with Team(library, 2) as team:
        yield team


def weights(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)


def unpacked(team: Team, packed: Packed) -> np.ndarray:
    return np.stack([unpack_row(team.library, packed, output) for output in range(packed.outputs)])


def q4_k_blocks(outputs: int, inputs: int) -> np.ndarray:
    """Random blocks: gguf reads Q4_K and doesn't write it."""
    generator = np.random.default_rng(3)
    blocks = generator.integers(0, 256, (outputs, inputs // 256, 144)).astype(np.uint8)
    blocks[..., :4] = generator.uniform(1e-4, 1e-2, (outputs, inputs // 256, 2)).astype(np.float16).view(np.uint8)
    return blocks.reshape(outputs, -1)


def gguf_rows(source: Source, outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks, and the floats that they stand for."""
    kind = GGMLQuantizationType[source.name]
    blocks = q4_k_blocks(outputs, inputs) if source is Source.Q4_K else quantize(weights(outputs, inputs), kind)
    return blocks, dequantize(blocks, kind)


@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("inputs", [2, 30, 32, 64, 66, 576])
def test_floats_and_bf16_come_back_as_they_were(team: Team, outputs: int, inputs: int) -> None:
    rows = weights(outputs, inputs)
    np.testing.assert_array_equal(unpacked(team, pack(team, Format.F32, [Matrix(Source.F32, rows, inputs)])), rows)
    bits = convert.float_to_bf16(team.library, rows)
    expected = convert.bf16_to_float(team.library, bits)
    for matrix in (Matrix(Source.F32, rows, inputs), Matrix(Source.BF16, bits, inputs)):
        np.testing.assert_array_equal(unpacked(team, pack(team, Format.BF16, [matrix])), expected)


@pytest.mark.parametrize("inputs", [2, 32, 66, 576])
def test_half_precision_sources(team: Team, inputs: int) -> None:
    rows = weights(5, inputs).astype(np.float16)
    packed = pack(team, Format.F32, [Matrix(Source.F16, rows, inputs)])
    np.testing.assert_array_equal(unpacked(team, packed), rows.astype(np.float32))


@pytest.mark.parametrize("inputs", [2, 31, 64, 100, 576])
def test_int8_is_within_half_a_step_of_its_channel(team: Team, inputs: int) -> None:
    rows = weights(40, inputs) * np.exp2(np.arange(40, dtype=np.float32))[:, None]
    rows[7] = 0
    error = np.abs(unpacked(team, pack(team, Format.INT8, [Matrix(Source.F32, rows, inputs)])) - rows)
    assert (error <= np.abs(rows).max(1, keepdims=True) / 127 * 0.501).all()


@pytest.mark.parametrize(("form", "steps"), [(Format.INT8_G32, 254), (Format.U4_G32, 15)])
@pytest.mark.parametrize("inputs", [32, 50, 576])
def test_grouped_formats_are_within_half_a_step_of_their_group(
    team: Team, form: Format, steps: int, inputs: int
) -> None:
    rows = weights(40, inputs)
    padded = np.zeros((40, -(-inputs // 32) * 32), np.float32)
    padded[:, :inputs] = rows
    groups = padded.reshape(40, -1, 32)
    span = groups.max(2) - groups.min(2) if form is Format.U4_G32 else 2 * np.abs(groups).max(2)
    back = np.zeros_like(padded)
    back[:, :inputs] = unpacked(team, pack(team, form, [Matrix(Source.F32, rows, inputs)]))
    error = np.abs(back - padded)[:, :inputs]
    allowed = np.repeat(span / steps * 0.51 + 2e-3, 32, axis=1)[:, :inputs]
    assert (error <= allowed).all()


@pytest.mark.parametrize("source", [Source.Q4_0, Source.Q4_1, Source.Q4_K])
def test_blocks_of_four_bits_keep_their_numbers(team: Team, source: Source) -> None:
    blocks, floats = gguf_rows(source, 37, 768)
    packed = pack(team, Format.U4_G32, [Matrix(source, blocks, 768)])
    exact = source is not Source.Q4_K  # whose scale times 6 bits is rounded to a half
    np.testing.assert_allclose(unpacked(team, packed), floats, rtol=0, atol=0 if exact else np.abs(floats).max() / 1024)


def test_q8_0_keeps_its_numbers(team: Team) -> None:
    blocks, floats = gguf_rows(Source.Q8_0, 37, 768)
    packed = pack(team, Format.INT8_G32, [Matrix(Source.Q8_0, blocks, 768)])
    np.testing.assert_array_equal(unpacked(team, packed), floats)


@pytest.mark.parametrize("source", [Source.Q8_0, Source.Q4_0, Source.Q4_1, Source.Q4_K])
def test_every_block_type_can_become_floats(team: Team, source: Source) -> None:
    blocks, floats = gguf_rows(source, 9, 512)
    np.testing.assert_allclose(unpacked(team, pack(team, Format.F32, [Matrix(source, blocks, 512)])), floats, rtol=1e-6)


def test_matrices_of_different_sources_stand_behind_one_another(team: Team) -> None:
    rows = weights(5, 64)
    blocks, floats = gguf_rows(Source.Q4_1, 30, 64)
    packed = pack(team, Format.F32, [Matrix(Source.F32, rows, 64), Matrix(Source.Q4_1, blocks, 64)])
    np.testing.assert_allclose(unpacked(team, packed), np.concatenate([rows, floats]), rtol=1e-6)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 48])
def test_gate_and_up_alternate_in_runs_of_sixteen(team: Team, columns: int) -> None:
    gate, up = weights(columns, 32, 1), weights(columns, 32, 2)
    packed = pack(team, Format.F32, [Matrix(Source.F32, gate, 32), Matrix(Source.F32, up, 32)], interleaved=True)
    runs = unpacked(team, packed).reshape(-1, 2, 16, 32)
    for side, expected in enumerate((gate, up)):
        rows = runs[:, side].reshape(-1, 32)
        np.testing.assert_array_equal(rows[:columns], expected)
        assert not rows[columns:].any()


def test_packed_bytes_are_the_same_on_every_run_and_fit_where_they_are_told(team: Team) -> None:
    for form in Format:
        size = packed_bytes(team.library, form, 45, 66)
        twice = [aligned_bytes(size), huge_bytes(size)]
        for room in twice:
            room[:] = 0xA5
            pack(team, form, [Matrix(Source.F32, weights(45, 66), 66)], into=room)
        np.testing.assert_array_equal(*twice)


def test_what_cannot_be_packed_is_refused_with_the_numbers(team: Team) -> None:
    rows = weights(4, 31)
    with pytest.raises(ValueError, match="31 is odd"):
        pack(team, Format.BF16, [Matrix(Source.F32, rows, 31)])
    with pytest.raises(ValueError, match="blocks of 32 weights, and 31"):
        Matrix(Source.Q4_0, np.zeros((4, 18), np.uint8), 31)
    with pytest.raises(ValueError, match="takes 124 bytes, not 120"):
        Matrix(Source.F32, weights(4, 30), 31)
    with pytest.raises(ValueError, match=r"differ in their inputs: \[31, 30\]"):
        pack(team, Format.F32, [Matrix(Source.F32, rows, 31), Matrix(Source.F32, weights(4, 30), 30)])
    with pytest.raises(ValueError, match="gate has 4 rows and up 3"):
        pack(team, Format.F32, [Matrix(Source.F32, rows, 31), Matrix(Source.F32, rows[:3], 31)], interleaved=True)
    with pytest.raises(ValueError, match="there is room for 64"):
        pack(team, Format.F32, [Matrix(Source.F32, rows, 31)], into=aligned_bytes(64))
    with pytest.raises(ValueError, match="multiple of 64"):
        Packed(Format.F32, 32, 1, aligned_bytes(192)[1:])
    with pytest.raises(IndexError, match="no row 4"):
        unpack_row(team.library, pack(team, Format.F32, [Matrix(Source.F32, rows, 31)]), 4)
