"""A model in one GGUF file. No torch here: `gguf_weights` reads the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from engine.model.gguf_header import CorruptGGUF, GGUFHeader
from engine.model.gguf_spec import spec_from_gguf
from engine.model.gguf_text import text_from_gguf
from engine.model.hf_names import LLAMA, Names
from engine.model.spec import ModelSpec, UnsupportedModel
from engine.pooling import Pooling
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
        with _told(header.path):
            return spec_from_gguf(header.metadata, frozenset(header.tensors), vocab_rows=rows)

    @property
    def names(self) -> Names:
        """The names that its families' parts have in a Hugging Face checkpoint, and so in adapters of them."""
        return LLAMA

    @property
    def pooling(self) -> Pooling | None:
        """None: what a file says of it is not read."""
        return None

    @property
    def generates(self) -> bool:
        """Whether the model has a head that chooses tokens."""
        return True

    @property
    def context_len(self) -> int:
        """Tokens that the model was made for."""
        return self.spec.context_len

    @cached_property
    def text(self) -> TextBundle:
        with _told(self.header.path):
            return text_from_gguf(self.header.metadata)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What is wrong with values that are of another type or size than they should be, as CorruptGGUF."""
    try:
        yield
    except (UnsupportedModel, CorruptGGUF):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CorruptGGUF(f"{path} holds metadata that make no sense: {type(error).__name__}: {error}") from error
