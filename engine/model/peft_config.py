"""What `adapter_config.json` of a PEFT adapter says, and what it asks for that isn't served. No torch here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.model.spec import UnsupportedModel

CONFIG = "adapter_config.json"
MOST_CONFIG_BYTES = 2**20
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` that leave the base model's weights as they are."""
_UNSERVED = {
    "use_dora": "the magnitudes of DoRA",
    "lora_bias": "biases of its own",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "layer_replication": "layers that are there several times",
    "target_parameters": "parameters that are no modules (target_parameters)",
    "trainable_token_indices": "embeddings of its own",
    "alora_invocation_tokens": "tokens that switch it on",
    "use_qalora": "QA-LoRA's groups",
}
_SUFFIX = re.compile(r"[\w.]+")


class UnsupportedAdapter(UnsupportedModel):
    """The adapter can't be served with this model; the message says why."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """How the pairs of matrices of an adapter add to the weights that they belong to."""

    rank: int | None
    """None if modules have ranks of their own (`rank_pattern`)."""
    alpha: float
    rank_stabilised: bool
    """Whether alpha is divided by the root of the rank, and not by the rank."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Of the modules whose names end so."""
    targets: tuple[str, ...] | None = None
    """Ends of the names of all modules that it belongs to; None if a regular expression, or a word, says which."""

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's pair, of this rank, is multiplied by."""
        alpha = next((alpha for end, alpha in self.alphas.items() if ends_with(module, end)), self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank


def ends_with(module: str, end: str) -> bool:
    """Whether whole parts of a module's name, from some dot on, are these."""
    return module == end or module.endswith(f".{end}")


def read_peft_config(directory: Path) -> PeftConfig:
    """Read the configuration of an adapter's directory. Raises `UnsupportedAdapter` for what isn't served."""
    path = directory / CONFIG
    if not path.is_file():
        raise UnsupportedAdapter(f"{directory} holds no {CONFIG}: it is no directory of a PEFT adapter")
    if path.stat().st_size > MOST_CONFIG_BYTES:
        raise UnsupportedAdapter(f"{path} has {path.stat().st_size} bytes, which no configuration has")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise TypeError(f"it holds a {type(fields).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise UnsupportedAdapter(f"{path} is not readable as JSON with named fields: {error}") from error
    _check_kind(path, fields)
    try:
        return _read(fields)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UnsupportedAdapter(f"{path} makes no sense: {error}") from error


def _check_kind(path: Path, fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise UnsupportedAdapter(f"{path} is of the type {fields.get('peft_type')!r}, and only LORA is served")
    asked = [what for name, what in _UNSERVED.items() if fields.get(name)]
    if fields.get("bias", "none") != "none":
        asked.append(f"biases of its own (bias={fields['bias']!r})")
    if fields.get("init_lora_weights", True) not in _PLAIN_STARTS:
        asked.append(f"other base weights (init_lora_weights={fields['init_lora_weights']!r})")
    if asked:
        raise UnsupportedAdapter(f"{path} asks for {', '.join(asked)}: only pairs of low rank are served")


def _read(fields: Mapping[str, Any]) -> PeftConfig:
    targets = fields.get("target_modules")
    alphas = {str(end): _number("alpha_pattern", alpha) for end, alpha in (fields.get("alpha_pattern") or {}).items()}
    unread = [end for end in alphas if not _SUFFIX.fullmatch(end)]
    if unread:
        raise ValueError(f"alpha_pattern has the regular expression {unread[0]!r}; only ends of names are read")
    rank = fields.get("r", 8)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"the rank r is {rank!r}")
    return PeftConfig(
        rank=None if fields.get("rank_pattern") else rank,
        alpha=_number("lora_alpha", fields.get("lora_alpha", 8)),
        rank_stabilised=bool(fields.get("use_rslora")),
        alphas=alphas,
        targets=tuple(map(str, targets)) if isinstance(targets, list) else None,
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, and no finite number")
    return float(value)
