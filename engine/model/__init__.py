"""Models: from a name to something that executes batches. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.fake import is_fake, load_fake
from engine.model.catalog import ModelSource, default_cache, resolve
from engine.model.digest import revision_of
from engine.model.gguf_file import GGUFFile
from engine.model.hf_dir import HFDirectory
from engine.model.openmp import wait_briefly
from text.bundle import TextBundle

if TYPE_CHECKING:
    from engine.batch import Model


def load_model(config: EngineConfig) -> Model:
    """Load the model that `config` names, fetching it first if it isn't here."""
    if is_fake(config.model):
        return load_fake(config.model)
    wait_briefly()
    from engine.runner import TorchModel

    return TorchModel.load(config)


def load_text(config: EngineConfig) -> tuple[TextBundle, str, int]:
    """The text side, the revision and the context length (tokens) of a model, without its weights."""
    if is_fake(config.model):
        info = load_fake(config.model).info
        return info.text, info.revision, info.context_len
    files = open_files(config)
    return files.text, revision(config, files), files.spec.usable_context_len


def open_files(config: EngineConfig) -> GGUFFile | HFDirectory:
    """The files of the model that `config` names; both kinds have `spec`, `text` and `files`."""
    source: ModelSource = resolve(config.model, config.cache or default_cache())
    return GGUFFile(source.path) if source.kind == "gguf" else HFDirectory(source.path)


def revision(config: EngineConfig, files: GGUFFile | HFDirectory) -> str:
    """A hash that changes with the weights, the tokenizer or the template."""
    return revision_of(files.files, config.cache or default_cache())
