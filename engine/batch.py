"""One step's work in plain integers: the border between scheduling and the device. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kernels.sampling import SamplingBatch
from text.bundle import TextBundle


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R requests, flat, as `kernels.protocol.AttentionMetadata` describes; S rows are sampled."""

    token_ids: list[int]
    """[T]"""
    positions: list[int]
    """[T]"""
    slots: list[int]
    """[T] page * page_size + offset"""
    query_start: list[int]
    """[R + 1]"""
    context_len: list[int]
    """[R]"""
    block_tables: list[list[int]]
    """[R] pages of each request, in order"""
    sample_rows: list[int]
    """[S] rows of the flat batch whose logits are wanted"""
    sampling: SamplingBatch
    known_tokens: list[list[int]] = field(default_factory=list)
    """[R] every token of each request, its context and what may come after it; read only, valid for this step"""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the scheduler and the door have to know of a loaded model."""

    revision: str
    """Hash that changes with the weights, the tokenizer or the template."""
    device: str
    context_len: int
    """The model's own limit, tokens."""
    vocab_size: int
    """Ids that may be sampled: the model cuts its logits to so many columns, however many rows its head has."""
    kv_bytes_per_token: int
    """Over all layers, keys and values."""
    text: TextBundle


class Model(Protocol):
    """A resident model with its KV storage: `engine.runner.TorchModel`, `engine.fake.FakeModel`."""

    info: ModelInfo

    def allocate_kv(self, pages: int, page_size: int) -> None:
        """Reserve the KV storage; called once, before the first step."""
        ...

    def execute(self, batch: Batch) -> list[int]:
        """Run one step: write the KV of its T tokens and return S sampled token ids."""
        ...

    def close(self) -> None:
        """Release weights and KV."""
        ...
