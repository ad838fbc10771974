"""A model's tensors under one set of names, whatever file they come from."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Weights(Protocol):
    """Tensors by canonical name, in the layout of Hugging Face: matrices [out, in], heads rotated by halves.

    `embedding`, `head`, `norm`, `rope_factors`, and for layer i `i.attn_norm`, `i.mlp_norm`, `i.q_norm`,
    `i.k_norm`, and `i.{q,k,v,o,gate,up,down}`; a bias is the same with `.bias` behind it.
    """

    def __contains__(self, name: object) -> bool: ...

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, float32 or the file's own type. It isn't kept: each call reads it again."""
        ...
