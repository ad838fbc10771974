"""A model in one GGUF file. No torch here: `gguf_weights` reads the tensors."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from engine.model.gguf_header import CorruptGGUF, GGUFHeader
from engine.model.gguf_text import text_from_gguf
from engine.model.spec import ModelSpec, spec_from_gguf
from text.bundle import TextBundle

EMBEDDING = "token_embd.weight"


class GGUFFile:
    """A GGUF file, opened."""

    def __init__(self, path: Path) -> None:
        self.header = GGUFHeader(path)
        self.files = [path]

    @cached_property
    def spec(self) -> ModelSpec:
        header = self.header
        if EMBEDDING not in header.tensors:
            raise CorruptGGUF(f"{header.path} has no tensor {EMBEDDING}: it is not a language model")
        rows = header.tensors[EMBEDDING].shape[0]
        return spec_from_gguf(header.metadata, frozenset(header.tensors), vocab_rows=rows)

    @cached_property
    def text(self) -> TextBundle:
        return text_from_gguf(self.header.metadata)
