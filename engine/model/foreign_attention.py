"""The attention function that models of `transformers` call: into the pages, or to see how a model attends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.model.hf_dir import HFDirectory
from engine.model.spec import ModelSpec, UnsupportedModel
from kernels.protocol import Attention, AttentionMetadata, Kernels

ATTENTION = "headrace"
"""Its name in `transformers`, and of the keyword that carries a step through a model's code."""


class Call(NamedTuple):
    """One layer's call."""

    layer: int
    q: Tensor
    """[T, H, D]"""
    k: Tensor
    """[T, G, D]"""
    v: Tensor
    """[T, G, Dv]"""
    attention: Attention


class Shape(NamedTuple):
    """Of one layer."""

    heads: int
    kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attends through the pages of one step."""

    kernels: Kernels
    meta: AttentionMetadata
    kv: Sequence[Any]
    still: Tensor
    """[most positions, 2, 0]: keys come rotated."""
    most_window: int | None

    def attend(self, call: Call) -> Tensor:
        """[T, H, Dv]; keys and values are written first."""
        size, value_size = call.k.shape[2], call.v.shape[2]
        qkv = torch.cat([call.q, call.k, pad(call.v, (0, size - value_size))], dim=1)
        kv = self.kv[call.layer]
        q = self.kernels.rotary_kv_write(qkv, self.still, self.meta, kv)
        windows = [window for window in (call.attention.window, self.most_window) if window is not None]
        attention = Attention(
            call.attention.scale, min(windows, default=None), call.attention.soft_cap, call.attention.sinks
        )
        return self.kernels.paged_attention(q, kv, self.meta, attention)[..., :value_size]


@dataclass(frozen=True, slots=True)
class Probe:
    """Notes what each layer asks for."""

    shapes: dict[int, Shape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)

    def attend(self, call: Call) -> Tensor:
        """Zeros [T, H, Dv]."""
        if call.layer in self.shapes:
            raise UnsupportedModel(f"layer {call.layer} attends twice")
        if call.v.shape[2] > call.k.shape[2]:
            raise UnsupportedModel("its values are wider than its keys")
        self.shapes[call.layer] = Shape(call.q.shape[1], call.k.shape[1], call.k.shape[2])
        self.windows[call.layer] = call.attention.window
        return call.q.new_zeros(*call.q.shape[:2], call.v.shape[2])

    def _check_reach(self, config: Any) -> None:
        """Raise UnsupportedModel if a long context would be treated otherwise than the few tokens of a trial."""
        types = dict(enumerate(getattr(config, "layer_types", None) or ()))
        strange = set(types.values()) - {"full_attention", "sliding_attention"}
        if strange or getattr(config, "attention_chunk_size", None) is not None:
            raise UnsupportedModel(f"it attends in another way too: {', '.join(sorted(strange)) or 'in chunks'}")
        local = [layer for layer, kind in types.items() if kind == "sliding_attention"]
        if any(self.windows.get(layer) is None for layer in local):
            raise UnsupportedModel("its code doesn't tell its attention how wide the window of a layer is")
        ropes = rope_types(getattr(config, "rope_parameters", None))
        if ropes & {"dynamic", "longrope"}:
            raise UnsupportedModel("its rotary positions change with the length of the context, keys in pages can't")

    def spec(self, model: Any, directory: HFDirectory) -> ModelSpec:
        """The model's sizes. What makes its layers special stays the affair of its own code."""
        shapes = set(self.shapes.values())
        if not shapes:
            raise UnsupportedModel("its code attends without the function that was given to it")
        if len(shapes) > 1 or set(self.shapes) != set(range(len(self.shapes))):
            raise UnsupportedModel(f"its layers have different shapes, or not each its own: {self.shapes}")
        self._check_reach(model.config.get_text_config())
        (shape,) = shapes
        windows = {window for window in self.windows.values() if window is not None}
        local = frozenset(layer for layer, window in self.windows.items() if window is not None)
        linears = [module.out_features for module in model.base_model.modules() if isinstance(module, nn.Linear)]
        return ModelSpec(
            architecture=model.config.model_type,
            vocab_rows=directory.vocab_rows,
            hidden_size=model.get_input_embeddings().embedding_dim,
            layers=len(self.shapes),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            inner_size=max(linears, default=shape.heads * shape.head_size),
            context_len=directory.context_len,
            norm_eps=0.0,
            rope=None,
            local_layers=local,
            local_window=max(windows, default=None),
        )


def rope_types(parameters: Any) -> set[str]:
    """The kinds of scaling in `rope_parameters`, which may hold some for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [rope_types(value) for value in parameters.values() if isinstance(value, dict)]
    return {str(parameters.get("rope_type"))}.union(*nested)


def register() -> None:
    """Make the function known to `transformers`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    headrace: PagedStep | Probe | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`transformers`' attention: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D]."""
    if headrace is None:
        raise UnsupportedModel("its code doesn't hand on what its attention needs")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel("its layers have no numbers")
    if attention_mask is not None or is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedModel("its attention isn't causal, or has a mask of its own")
    call = Call(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        Attention(
            scale=1 / math.sqrt(query.shape[-1]) if scaling is None else scaling,
            window=sliding_window,
            soft_cap=softcap,
            sinks=None if s_aux is None else s_aux.float(),
        ),
    )
    return headrace.attend(call)[None], None
