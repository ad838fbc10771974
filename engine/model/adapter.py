"""Low-rank adapters as PEFT writes them: a directory with a configuration and safetensors. No torch here.

Everything is checked against the model before anything runs. Which modules an adapter changes is what its file has
pairs for, and its configuration has to agree, as far as it says so without a regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.model.digest import revision_of
from engine.model.hf_names import PREFIXES, Names
from engine.model.peft_config import CONFIG, PeftConfig, UnsupportedAdapter, ends_with, read_peft_config
from engine.model.safetensors_file import CorruptSafetensors, SafetensorsFile
from engine.model.shapes import shapes
from engine.model.spec import ModelSpec, UnsupportedModel
from engine.model.weights import StoredTensor

TENSORS = "adapter_model.safetensors"
PARTS = ("q", "k", "v", "o", "gate", "up", "down")
"""Matrices of a layer that an adapter may change."""
MOST_RANK = 512
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>[\w.]+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a matrix: scale * expand [out, rank] times shrink [rank, in]."""

    shrink: StoredTensor
    expand: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.shrink.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, read."""

    name: str
    revision: str
    """A hash that changes with its files."""
    pairs: Mapping[str, LowRank]
    """By the canonical names of the model's matrices: `3.q`."""


def read_adapter(name: str, directory: Path, names: Names, spec: ModelSpec, cache: Path) -> Adapter:
    """Read an adapter for a model of this structure. Raises `UnsupportedAdapter` with what is wrong."""
    try:
        config = read_peft_config(directory)
        path = directory / TENSORS
        if not path.is_file():
            pickled = any(directory.glob("adapter_model.bin"))
            raise UnsupportedAdapter(
                f"{directory} has no {TENSORS}"
                + (": adapter_model.bin is a pickle, which can run code when read; convert it" if pickled else "")
            )
        pairs = _Pairs(SafetensorsFile(path), config, names, spec).read()
        return Adapter(name, revision_of([directory / CONFIG, path], cache), pairs)
    except (UnsupportedModel, CorruptSafetensors, OSError) as error:
        raise UnsupportedAdapter(f"adapter {name!r} can't be served: {error}") from error


def stack(adapters: Sequence[Adapter], names: Sequence[str], widths: Sequence[int]) -> tuple[Floats, Floats] | None:
    """What adapters add to joined matrices of these names and outputs, padded with zeros to one rank.

    [A, P, rank, in] and [A, out, rank], the second one with the scales in it; None if that is nothing.
    """
    pairs = [[adapter.pairs.get(name) for name in names] for adapter in adapters]
    found = [pair for of_adapter in pairs for pair in of_adapter if pair is not None]
    if not found:
        return None
    rank, inputs = max(pair.rank for pair in found), found[0].shrink.shape[1]
    shrink = np.zeros((len(adapters), len(names), rank, inputs), np.float32)
    expand = np.zeros((len(adapters), sum(widths), rank), np.float32)
    for adapter, of_adapter in enumerate(pairs):
        first = 0
        for part, (pair, width) in enumerate(zip(of_adapter, widths, strict=True)):
            if pair is not None:
                shrink[adapter, part, : pair.rank] = pair.shrink.float32()
                expand[adapter, first : first + width, : pair.rank] = pair.expand.float32() * np.float32(pair.scale)
            first += width
    return shrink, expand


def step_bytes(spec: ModelSpec, adapters: Sequence[Adapter], element_bytes: int) -> int:
    """What each token of a step needs for its adapter while a product is computed: its outputs, and what is shrunk."""
    if not adapters:
        return 0
    rank = max(pair.rank for adapter in adapters for pair in adapter.pairs.values())
    heads = (spec.heads + 2 * spec.kv_heads) * spec.head_size
    return max(heads, 2 * spec.inner_size) * element_bytes + 3 * rank * 4


class _Pairs:
    """The tensors of one file, as pairs for the matrices of a model."""

    def __init__(self, file: SafetensorsFile, config: PeftConfig, names: Names, spec: ModelSpec) -> None:
        self._file = file
        self._config = config
        self._shapes = {name: shape for name, shape in shapes(spec) if name.rpartition(".")[2] in PARTS}
        self._parts: dict[str, tuple[str, ...]] = {
            inner: (part,) for part, inner in names.parts.items() if part in PARTS
        }
        self._parts.update(names.joined)
        layers = "|".join(re.escape(prefix + names.layers) for prefix in PREFIXES)
        self._module = re.compile(rf"(?:{layers})\.(\d{{1,6}})\.([\w.]+)")

    def read(self) -> dict[str, LowRank]:
        """The pairs by canonical name. Raises `UnsupportedAdapter` for whatever doesn't fit."""
        sides = self._sides()
        pairs: dict[str, LowRank] = {}
        for module, tensors in sides.items():
            lacking = {"A", "B"} - tensors.keys()
            if lacking:
                raise UnsupportedAdapter(f"{self._file.path} has no lora_{lacking.pop()} for {module}")
            for name, pair in self._of_module(module, self._file[tensors["A"]], self._file[tensors["B"]]):
                if name in pairs:
                    raise UnsupportedAdapter(f"{self._file.path} has more than one pair for the model's {name}")
                pairs[name] = pair
        if not pairs:
            raise UnsupportedAdapter(f"{self._file.path} holds no tensors")
        self._check_targets(sides)
        return pairs

    def _sides(self) -> dict[str, dict[str, str]]:
        """The names of each module's two tensors."""
        sides: dict[str, dict[str, str]] = {}
        for name in self._file.names:
            found = _TENSOR.fullmatch(name)
            if found is None:
                raise UnsupportedAdapter(f"{self._file.path} holds {name}, which is no part of a pair lora_A, lora_B")
            if (other := sides.setdefault(found["module"], {}).setdefault(found["side"], name)) != name:
                raise UnsupportedAdapter(f"{self._file.path} holds both {other} and {name}: which one is meant?")
        return sides

    def _of_module(self, module: str, shrink: StoredTensor, expand: StoredTensor) -> Iterator[tuple[str, LowRank]]:
        matrices = self._matrices(module)
        outputs, inputs = sum(self._shapes[name][0] for name in matrices), self._shapes[matrices[0]][1]
        rank = shrink.shape[0] if len(shrink.shape) == 2 else 0
        if shrink.shape != (rank, inputs) or expand.shape != (outputs, rank):
            raise UnsupportedAdapter(
                f"the pair of {module} has the shapes {shrink.shape} and {expand.shape}; the model's matrix wants"
                f" (rank, {inputs}) and ({outputs}, rank)"
            )
        if not 1 <= rank <= MOST_RANK:
            raise UnsupportedAdapter(f"the pair of {module} has the rank {rank}, and served are 1 to {MOST_RANK}")
        if rank != (said := self._config.rank_of(module)):
            raise UnsupportedAdapter(f"the pair of {module} has the rank {rank}, and {CONFIG} says {said}")
        if not all(np.isfinite(tensor.float32()).all() for tensor in (shrink, expand)):
            raise UnsupportedAdapter(f"the pair of {module} holds values that are no numbers")
        first, scale = 0, self._config.scale(module, rank)
        with np.errstate(over="ignore"):
            if not np.isfinite(expand.float32() * np.float32(scale)).all():
                raise UnsupportedAdapter(f"the pair of {module} is scaled by {scale:g}, which its values don't stand")
        for name in matrices:
            end = first + self._shapes[name][0]
            yield name, LowRank(shrink, expand.some_rows(slice(first, end)), scale)
            first = end

    def _matrices(self, module: str) -> list[str]:
        """The canonical names of the model's matrices that a module is."""
        found = self._module.fullmatch(module)
        parts = self._parts.get(found[2], ()) if found is not None else ()
        matrices = [f"{int(found[1])}.{part}" for part in parts] if found is not None else []
        if not matrices or any(name not in self._shapes for name in matrices):
            served = ", ".join(sorted(self._parts))
            raise UnsupportedAdapter(f"it changes {module}, and served with this model are adapters of {served}")
        assert found is not None
        by = self._config.leaves_out(module, int(found[1]))
        if by is not None:
            raise UnsupportedAdapter(f"{self._file.path} has tensors of {module}, which {by} of {CONFIG} leaves out")
        return matrices

    def _check_targets(self, modules: Mapping[str, object]) -> None:
        """Whatever is targeted, isn't excluded, and is in the model, is in the file."""
        config = self._config
        there = [found for module in modules if (found := self._module.fullmatch(module)) is not None]
        for target in config.targets or ():
            known = [inner for inner in self._parts if ends_with(inner, target)]
            wanted = any(not any(ends_with(inner, end) for end in config.excluded) for inner in known)
            if wanted and not config.excluded_by_expression and not any(ends_with(one[2], target) for one in there):
                raise UnsupportedAdapter(f"{CONFIG} targets {target}, and {self._file.path} has no tensors of it")
        lacking = sorted((config.layers or set()) - {int(one[1]) for one in there})
        if lacking:
            raise UnsupportedAdapter(
                f"{CONFIG} has layer {lacking[0]} in layers_to_transform, and {self._file.path} no tensors of it"
            )
