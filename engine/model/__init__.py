"""Models: from a name to something that executes batches. Importing this package imports no torch."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.fake import is_fake, load_fake
from engine.model.adapter import Adapter, read_adapter
from engine.model.catalog import ModelSource, default_cache, resolve
from engine.model.device import is_cpu
from engine.model.digest import revision_of
from engine.model.gguf_file import GGUFFile
from engine.model.gguf_weights import GGUFWeights
from engine.model.hf_dir import HFDirectory, HFWeights
from engine.model.openmp import wait_briefly
from engine.model.shapes import check_shapes
from engine.model.spec import ForeignModel, ModelSpec
from engine.model.weights import Weights
from kernels import ensure_ours
from text.bundle import TextBundle

if TYPE_CHECKING:
    from engine.batch import Model, ModelInfo

logger = logging.getLogger(__name__)

ModelFiles = GGUFFile | HFDirectory
"""Both have `spec`, `names`, `context_len`, `pooling`, `text` and `files`."""


def load_model(config: EngineConfig) -> Model:
    """Load the model that `config` names, and the one that guesses for it, if it names one."""
    if config.speculative_model is None:
        return load_one(config)
    from engine.drafted import DraftedModel

    try:
        drafting = draft_config(config, config.speculative_model)
        if not is_fake(drafting.model):
            open_files(drafting)
    except ValueError as error:
        raise type(error)(f"speculative_model: {error}") from error
    target = load_one(config)
    draft: Model | None = None
    try:
        draft = load_one(drafting)
        return DraftedModel(target, draft, config)
    except BaseException:
        target.close()
        if draft is not None:
            draft.close()
        raise


def draft_config(config: EngineConfig, name: str) -> EngineConfig:
    """How the draft model is loaded: as the target, but for blocks of a GGUF file that it doesn't have."""
    own = replace(config, model=name, speculative_model=None, embeddings=False, ops={}, adapters={})
    blocks = config.quantization == "gguf" and not (is_fake(name) or isinstance(open_files(own), GGUFFile))
    return replace(own, quantization="int8") if blocks else own


def load_one(config: EngineConfig) -> Model:
    """Load the model that `config` names, fetching it first if it isn't here.

    On a CPU the compiled library serves if it can; torch, which takes seconds to import, serves all else.
    """
    if is_fake(config.model):
        if config.tensor_parallel_size > 1:
            raise ValueError("the fake model runs on no device that it could be divided among")
        return load_fake(config.model, tuple(config.adapters))
    ensure_ours()
    files = open_files(config)
    if config.quantization == "gguf" and not isinstance(files, GGUFFile):
        raise ValueError(f"quantization='gguf' keeps the blocks of a GGUF file, and {config.model} is none")
    if files.pooling is not None:
        config = replace(config, embeddings=True)
    if is_cpu(config.device):
        from engine.cpu.model import CpuModel, obstacle

        try:
            why_not = obstacle(config, spec_of(config, files))
        except ForeignModel as foreign:
            why_not = str(foreign)
        if why_not is None:
            return CpuModel.load(config, files)
        logger.warning("torch serves %s, which is slower than the CPU library: %s", config.model, why_not)
    wait_briefly()
    if config.tensor_parallel_size > 1:
        from engine.parallel.model import ParallelModel

        return ParallelModel.load(config, files)
    if is_cpu(config.device):
        from engine.runner import TorchModel

        return TorchModel.load(config, files)
    from engine.gpu import GpuModel

    return GpuModel.load(config, files)


def load_text(config: EngineConfig) -> tuple[TextBundle, str, int]:
    """The text side, the revision and the context length (tokens) of a model, without its weights."""
    if is_fake(config.model):
        info = load_fake(config.model).info
        return info.text, info.revision, info.context_len
    files = open_files(config)
    return files.text, revision(config, files), files.context_len


def open_files(config: EngineConfig) -> ModelFiles:
    """The files of the model that `config` names."""
    source: ModelSource = resolve(config.model, config.cache or default_cache())
    return GGUFFile(source.path) if source.kind == "gguf" else HFDirectory(source.path)


def spec_of(config: EngineConfig, files: ModelFiles) -> ModelSpec:
    """The structure of the model in `files`, as `config` wants it to attend."""
    spec = files.spec.narrowed(config.sliding_window)
    check_compression(config, spec)
    return spec


def check_compression(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ValueError for a model with windows whose context is to be thinned: it would count what isn't there."""
    windows = sorted(window for window in spec.windows if window is not None)
    if config.kv_compression.thins and windows:
        raise ValueError(
            f"kv_compression.ratio={config.kv_compression.ratio} needs layers that see their whole context, and this"
            f" model has some that see {windows[0]} tokens: set kv_compression.ratio to 1"
            + ("" if config.sliding_window is None else ", or leave sliding_window out")
        )


def open_weights(files: ModelFiles, spec: ModelSpec) -> Weights:
    """The tensors in `files`: all that the model is made of, each of the shape that it has to have."""
    weights: Weights = GGUFWeights(files.header, spec) if isinstance(files, GGUFFile) else HFWeights(files)
    check_shapes(spec, weights)
    return weights


def open_adapters(config: EngineConfig, files: ModelFiles) -> tuple[Adapter, ...]:
    """The adapters that `config` names, read and checked against the model in `files`."""
    if not config.adapters:
        return ()
    try:
        names, spec = files.names, files.spec
    except ForeignModel as reason:
        raise ForeignModel(f"no adapter of {config.model} can be served: {reason}") from reason
    cache = config.cache or default_cache()
    return tuple(read_adapter(name, Path(path), names, spec, cache) for name, path in config.adapters.items())


def reopen(config: EngineConfig, info: ModelInfo) -> tuple[ModelFiles, tuple[Adapter, ...]]:
    """The files of a model that was loaded before. Raises RuntimeError if they are others now."""
    files = open_files(config)
    found = revision(config, files)
    if found != info.revision:
        raise RuntimeError(f"the files of {config.model} are those of another model now: {found}")
    adapters = open_adapters(config, files)
    changed = [adapter.name for adapter in adapters if adapter.revision != info.adapters[adapter.name]]
    if changed:
        raise RuntimeError(f"the files of adapter {changed[0]!r} are those of another one now")
    return files, adapters


def revision(config: EngineConfig, files: ModelFiles) -> str:
    """A hash that changes with the weights, the tokenizer or the template."""
    return revision_of(files.files, config.cache or default_cache())
