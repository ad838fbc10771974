"""The protocol that every implementation of the operations fulfils.

Shapes: T tokens of the step, R requests of the step, S rows to sample, H query heads, G key/value
heads (H is a multiple of G), D head size, P pages of the pool, B page size in tokens, V vocabulary.
Index tensors are int32, contiguous. The residual stream is float32. Weights, activations and KV have
one dtype, the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.adapters import AdapterRows, Adapters
from kernels.columns import Columns
from kernels.kv import KVLayout, Thinning
from kernels.sampling import Sampled, SamplingBatch
from kernels.weights import QuantisedWeight


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step stand: a variable-length batch of prefill chunks and decode tokens.

    Request r owns the rows `query_start[r] : query_start[r + 1]`; they are the last of its
    `context_len[r]` tokens. Page j of its context is `block_table[r, j]`; unused entries are 0. A context that was
    thinned has fewer tokens than its last position says.
    """

    positions: Tensor
    """[T] position of each token in its sequence."""
    slots: Tensor
    """[T] where each token's key and value go: page * page_size + offset."""
    query_start: Tensor
    """[R + 1] first row of each request."""
    context_len: Tensor
    """[R] tokens of each request up to and with its last row here."""
    block_table: Tensor
    """[R, most pages of a request]."""
    max_query: int
    max_context: int
    layout: KVLayout
    plan: Any = None
    """What `Kernels.prepare` computed for this step; only its own implementation reads it."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's variant of causal attention."""

    scale: float
    """Of the products of queries and keys."""
    window: int | None = None
    """Tokens that a query sees, itself included; None for all before it. What lies behind it is never read."""
    soft_cap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    sinks: Tensor | None = None
    """[H] float32: scores that take part in the softmax and carry no value."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window has one token at least, not {self.window}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"a soft cap is over 0, not {self.soft_cap}")


class Linear(Protocol):
    """A weight in the form that its implementation likes best."""

    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] of the model's dtype -> [T, out] of the same dtype. A row depends on no other row's values."""
        ...


class Kernels(Protocol):
    """One device's implementation."""

    name: str
    stays_on_device: bool
    """Whether no value comes to the host, but in `sample`: such steps can be recorded and replayed."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Pack a weight [out, in] and an optional bias [out]."""
        ...

    def quantised_linear(self, weight: QuantisedWeight, bias: Tensor | None = None) -> Linear:
        """The same of a weight in 8 or 4 bits; `bias` is of the activations' type."""
        ...

    def add_adapters(self, x: Tensor, out: Tensor, rows: AdapterRows, adapters: Adapters) -> None:
        """Add to out [T, out] what each row's adapter makes of x [T, in]; rows without one keep every bit."""
        ...

    def kv_views(self, storage: Tensor, layout: KVLayout, dtype: torch.dtype) -> Sequence[Any]:
        """Each layer's keys and values of all pages in `storage` [bytes] uint8: views, which only this reads."""
        ...

    def prepare(self, meta: AttentionMetadata, dtype: torch.dtype) -> AttentionMetadata:
        """Fill `meta.plan` with what attention needs once for each step instead of once for each layer.

        Called before the first layer; `dtype` is the model's.
        """
        ...

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """[V, hidden], [T] -> [T, hidden] float32."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        """[T, hidden] float32 -> [T, hidden] of `out_dtype`; the mean square in float32."""
        ...

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Add x [T, hidden] to the residual [T, hidden] float32; return the new residual and its norm.

        The residual that was passed in is given up: its storage may be reused.
        """
        ...

    def rotary_kv_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        meta: AttentionMetadata,
        kv: Any,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> Tensor:
        """Split qkv [T, H + 2G, D]; normalise q and k (optional, per head), rotate them, write k and v to their slots.

        `cos_sin` is [most positions, 2, R / 2] float32: the first R of the D components of each head are rotated, by
        halves as in GPT-NeoX, and those behind stay as they are. Returns the rotated q [T, H, D].
        """
        ...

    def paged_attention(self, q: Tensor, kv: Any, meta: AttentionMetadata, attention: Attention) -> Tensor:
        """Causal attention of q [T, H, D] over each request's pages -> [T, H, D]."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * inner] -> silu(first half) * second half, [T, inner]."""
        ...

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * inner] -> gelu(first half, by its tanh form) * second half, [T, inner]."""
        ...

    def copy_pages(self, storage: Tensor, layout: KVLayout, source: Tensor, target: Tensor) -> None:
        """Copy pages `source` [n] of `storage` [bytes] uint8 onto pages `target` [n], all layers of them."""
        ...

    def thin(self, kv: Sequence[Any], layout: KVLayout, work: Thinning) -> None:
        """Thin one request's context in the pools `kv` of all layers, in place: see `kernels.thinning`."""
        ...

    def choose(self, logits: Tensor, columns: Columns) -> Tensor:
        """What `sample` chooses for logits [S, V] float32, if the columns say all that is asked of them: [S] int32."""
        ...

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """Choose a token for each row of logits [S, V] float32, and report the logprobs that are asked for.

        Greedy rows take the lowest id of the greatest logit, whatever else is in the batch. The
        random number of a sampled row depends on its (seed, position) alone.
        """
        ...
