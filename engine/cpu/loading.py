"""From a model's files to the decoder that the library walks through, by way of packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.batch import ModelInfo
from engine.config import EngineConfig
from engine.cpu.cache import packed_path, read_packed, write_packed
from engine.cpu.packed import PackedWeights, lay_out, new_block
from engine.cpu.recipe import RECIPE_VERSION, Recipe, choose_format, norm_names, recipes
from engine.model import ModelFiles, open_weights, spec_of
from engine.model.adapter import Adapter, stack
from engine.model.catalog import default_cache
from engine.model.rotary import rotary_table_of
from engine.model.spec import ModelSpec
from engine.model.weights import StoredTensor
from kernels.cpu.adapters import PackedAdapters, pack_adapters
from kernels.cpu.layers import NUMBERS, Heads
from kernels.cpu.library import Library, Team
from kernels.cpu.packing import (
    INTERLEAVED_ROWS,
    PACKING_VERSION,
    Format,
    Matrix,
    Packed,
    Source,
    pack,
    packed_bytes,
)
from kernels.cpu.screen import Screen, bounds_of, measure
from kernels.cpu.step import DecoderModel, Layer


class Loader:
    """Packs one model's weights in memory, or finds them packed on disk, and makes a decoder of them."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        info: ModelInfo,
        dtype: str,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`dtype`, float32 or bfloat16, is that of what isn't quantised."""
        spec = spec_of(config, files)
        self._config = config
        self._spec = spec
        self._adapters = adapters
        self._source = open_weights(files, spec)
        here = Path(config.model)
        self._name = str(here.resolve()) if here.exists() else config.model
        self._dtype = dtype
        self._vocab_size = info.vocab_size
        self._recipes = list(recipes(spec, info.vocab_size, config.quantization))
        self._identity: dict[str, str | int] = {
            "revision": info.revision,
            "packing": PACKING_VERSION,
            "recipe": RECIPE_VERSION,
            "quantization": config.quantization,
            "dtype": dtype,
        }

    def load(self, team: Team) -> DecoderModel:
        """The decoder; its packed weights are kept on disk for the next time."""
        formats = {recipe.name: self._format(recipe) for recipe in self._recipes}
        sizes_bytes = self._sizes_bytes(team, formats)
        path = packed_path(self._config.cache or default_cache(), self._identity)
        weights = read_packed(path, self._identity, team.threads)
        if weights is None or {name: place.size_bytes for name, place in weights.places.items()} != sizes_bytes:
            weights = self._pack(team, formats, sizes_bytes)
            write_packed(path, self._identity, weights, self._name)
        return self._adapted(self._decoder(weights, formats), team.library)

    def _format(self, recipe: Recipe) -> Format:
        parts = [self._source[name] for name in recipe.parts]
        return choose_format(recipe, parts, self._dtype, self._config.quantization)

    def _sizes_bytes(self, team: Team, formats: dict[str, Format]) -> dict[str, int]:
        """Of each array of the block, by name."""
        sizes = {}
        for recipe in self._recipes:
            sizes[recipe.name] = packed_bytes(team.library, formats[recipe.name], recipe.outputs, recipe.inputs)
            if recipe.bias:
                sizes[f"{recipe.name}.bias"] = 4 * recipe.outputs
        for name in norm_names(self._spec):
            sizes[name] = 4 * self._source[name].shape[0]
        if "screen" in formats:
            sizes["screen.errors"] = sizes["screen.norms"] = 4 * bounds_of(self._vocab_size)
        return sizes

    def _pack(self, team: Team, formats: dict[str, Format], sizes_bytes: dict[str, int]) -> PackedWeights:
        places, size = lay_out(sizes_bytes)
        weights = PackedWeights(new_block(size), places)
        for recipe in self._recipes:
            parts = [_matrix(self._source[name], recipe) for name in recipe.parts]
            pack(team, formats[recipe.name], parts, interleaved=recipe.gated, into=weights.bytes(recipe.name))
            if recipe.bias:
                biases = [self._source[f"{name}.bias"].float32() for name in recipe.parts]
                weights.floats(f"{recipe.name}.bias")[:] = (
                    interleave(*biases) if recipe.gated else np.concatenate(biases)
                )
        for name in norm_names(self._spec):
            weights.floats(name)[:] = self._source[name].float32()
        decoder = self._decoder(weights, formats)
        if decoder.screen is not None:
            measure(team, decoder.head, decoder.screen)
        return weights

    def _decoder(self, weights: PackedWeights, formats: dict[str, Format]) -> DecoderModel:
        spec, config = self._spec, self._config
        packed = {
            recipe.name: Packed(formats[recipe.name], recipe.outputs, recipe.inputs, weights.bytes(recipe.name))
            for recipe in self._recipes
        }
        embedding = packed["embedding"]
        tied = Packed(embedding.format, self._vocab_size, embedding.inputs, embedding.bytes)
        screen = None
        if "screen" in packed:
            screen = Screen(packed["screen"], weights.floats("screen.errors"), weights.floats("screen.norms"))

        def floats(name: str) -> NDArray[np.float32] | None:
            return weights.floats(name) if name in weights else None

        return DecoderModel(
            heads=heads_of(config, spec, self._dtype),
            hidden=spec.hidden_size,
            inner=spec.inner_size,
            layers=[
                Layer(
                    qkv=packed[f"{i}.qkv"],
                    output=packed[f"{i}.o"],
                    gate_up=packed[f"{i}.gate_up"],
                    down=packed[f"{i}.down"],
                    attention_norm=weights.floats(f"{i}.attn_norm"),
                    mlp_norm=weights.floats(f"{i}.mlp_norm"),
                    q_norm=floats(f"{i}.q_norm"),
                    k_norm=floats(f"{i}.k_norm"),
                    qkv_bias=floats(f"{i}.qkv.bias"),
                    output_bias=floats(f"{i}.o.bias"),
                    gate_up_bias=floats(f"{i}.gate_up.bias"),
                    down_bias=floats(f"{i}.down.bias"),
                )
                for i in range(spec.layers)
            ],
            embedding=embedding,
            head=packed.get("head", tied),
            screen=screen,
            norm=weights.floats("norm"),
            cos_sin=rotary_table_of(spec, self._source, min(spec.context_len, config.max_seq_len)),
            norm_eps=spec.norm_eps,
            scale=spec.scale,
        )

    def _adapted(self, decoder: DecoderModel, library: Library) -> DecoderModel:
        """The decoder with the adapters of its layers, which aren't kept on disk."""
        if not self._adapters:
            return decoder
        joined = {recipe.name: recipe for recipe in self._recipes}
        layers = [
            replace(
                layer,
                qkv_adapters=self._packed_adapters(joined[f"{i}.qkv"], library),
                output_adapters=self._packed_adapters(joined[f"{i}.o"], library),
                gate_up_adapters=self._packed_adapters(joined[f"{i}.gate_up"], library),
                down_adapters=self._packed_adapters(joined[f"{i}.down"], library),
            )
            for i, layer in enumerate(decoder.layers)
        ]
        return replace(decoder, layers=layers)

    def _packed_adapters(self, recipe: Recipe, library: Library) -> PackedAdapters | None:
        widths = [self._source.shape(name)[0] for name in recipe.parts]
        stacked = stack(self._adapters, recipe.parts, widths)
        if stacked is None:
            return None
        is_float = self._dtype == "float32"
        return pack_adapters(library, *stacked, widths, is_float=is_float, interleaved=recipe.gated)


def heads_of(config: EngineConfig, spec: ModelSpec, dtype: str) -> Heads:
    """How the model's attention is arranged, and what its pages hold."""
    return Heads(
        spec.heads,
        spec.kv_heads,
        spec.head_size,
        config.page_size,
        is_float=dtype == "float32",
        window_tokens=spec.reach_tokens,
        numbers=NUMBERS[config.kv_cache_dtype],
    )


def _matrix(tensor: StoredTensor, recipe: Recipe) -> Matrix:
    """A tensor for the packer, cut to the rows that are wanted; block types that it doesn't know become floats."""
    if len(recipe.parts) == 1:
        tensor = tensor.first_rows(recipe.outputs)
    if tensor.kind in Source.__members__:
        return Matrix(Source[tensor.kind], np.ascontiguousarray(tensor.data), recipe.inputs)
    return Matrix(Source.F32, tensor.float32(), recipe.inputs)


def interleave(gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:
    """Numbers of gate and up [n] in the order of their packed rows; zeros where a run of rows isn't full."""
    runs = -(-len(gate) // INTERLEAVED_ROWS)
    both = np.zeros((2, runs * INTERLEAVED_ROWS), np.float32)
    both[0, : len(gate)], both[1, : len(up)] = gate, up
    return both.reshape(2, runs, INTERLEAVED_ROWS).swapaxes(0, 1).reshape(-1)
