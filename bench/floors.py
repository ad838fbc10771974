"""The shortest time that the machine's limits allow for a workload: products at the measured rate, memory read once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.limits import Limits

KV_VALUE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes."""

    layers: int
    hidden: int
    inner: int
    vocab: int
    q_width: int
    kv_width: int
    """Of keys, and of values."""

    @classmethod
    def of(cls, directory: Path) -> Self:
        """The shape that a Hugging Face directory names."""
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return cls(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["intermediate_size"],
            config["vocab_size"],
            config["num_attention_heads"] * head,
            config["num_key_value_heads"] * head,
        )

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of all layers."""
        attention = 2 * self.hidden * self.q_width + 2 * self.hidden * self.kv_width
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def parameters(self) -> int:
        """Weights that a step reads: all layers and the head."""
        return self.layer_weights + self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_width * KV_VALUE_BYTES


def batch_floor_s(
    shape: Shape, limits: Limits, precision: str, prompt_tokens: Iterable[int], cached: int, new: int
) -> float:
    """For prompts that run together to `new` tokens each, of which `cached` are computed once for all.

    Every prompt's tokens pass the layers, every new one the head too; each new token reads its context's keys
    and values. The weights are read so rarely, for each token, that they don't count.
    """
    rate = limits.int8_ops_per_s if precision == "int8" else limits.bf16_ops_per_s
    lengths = list(prompt_tokens)
    passed = sum(length - cached for length in lengths) + cached + len(lengths) * (new - 1)
    operations = 2 * (passed * shape.layer_weights + len(lengths) * new * shape.vocab * shape.hidden)
    contexts = sum(new * length + new * (new - 1) // 2 for length in lengths)
    return operations / rate + contexts * shape.kv_bytes_per_token / limits.read_bytes_per_s


def token_floor_s(shape: Shape, limits: Limits, weights_bytes: int, context: int) -> float:
    """For one token of one request: all weights and its context's keys and values are read once."""
    return (weights_bytes + context * shape.kv_bytes_per_token) / limits.read_bytes_per_s


def batch_step_floor_s(shape: Shape, limits: Limits, weights_bytes: int, batch: int, context: int) -> float:
    """For one token of each of `batch` requests in bf16: products or weights, whichever takes longer, then the KV."""
    products_s = 2 * batch * shape.parameters / limits.bf16_ops_per_s
    weights_s = weights_bytes / limits.read_bytes_per_s
    return max(products_s, weights_s) + batch * context * shape.kv_bytes_per_token / limits.read_bytes_per_s
