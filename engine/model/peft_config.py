"""What `adapter_config.json` of a PEFT adapter says, and what it asks for that isn't served. No torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.model import strict_json
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

    rank: int
    alpha: float
    rank_stabilised: bool
    """Whether alpha is divided by the root of the rank, and not by the rank."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of the modules whose names end so."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """The same."""
    targets: tuple[str, ...] | None = None
    """Ends of the names of all modules that it belongs to; None if a regular expression, or a word, says which."""
    excluded: tuple[str, ...] = ()
    """Ends of the names of modules that it doesn't belong to all the same."""
    excluded_by_expression: bool = False
    """Whether a regular expression says which, so that nobody knows what should be there."""
    layers: frozenset[int] | None = None
    """The layers whose modules it belongs to; None for all."""

    def rank_of(self, module: str) -> int:
        """Of a module's pair."""
        return int(_of("rank_pattern", self.ranks, module, self.rank))

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's pair, of this rank, is multiplied by."""
        alpha = _of("alpha_pattern", self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank

    def leaves_out(self, module: str, layer: int) -> str | None:
        """What of it says that a module of a layer isn't changed; None if nothing does."""
        if self.layers is not None and layer not in self.layers:
            return "layers_to_transform"
        if any(ends_with(module, end) for end in self.excluded):
            return "exclude_modules"
        if self.targets is not None and not any(ends_with(module, end) for end in self.targets):
            return "target_modules"
        return None


def _of(field_name: str, values: Mapping[str, float], module: str, default: float) -> float:
    """What a pattern says of a module. Raises `UnsupportedAdapter` if it says two things.

    PEFT takes the first that fits, and doesn't keep their order when it writes them.
    """
    fitting = {end: value for end, value in values.items() if ends_with(module, end)}
    if len(set(fitting.values())) > 1:
        told = " and ".join(f"{value:g} by {end!r}" for end, value in fitting.items())
        raise UnsupportedAdapter(f"{field_name} of {CONFIG} says of {module} {told}: which one is meant?")
    return next(iter(fitting.values()), default)


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
        fields = strict_json.loads(path.read_text(encoding="utf-8"))
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
    targets, excluded = fields.get("target_modules"), fields.get("exclude_modules")
    alphas, ranks = (_pattern(fields, name) for name in ("alpha_pattern", "rank_pattern"))
    return PeftConfig(
        rank=_whole("the rank r", fields.get("r", 8), 1),
        alpha=_number("lora_alpha", fields.get("lora_alpha", 8)),
        rank_stabilised=bool(fields.get("use_rslora")),
        ranks={end: _whole("rank_pattern", rank, 1) for end, rank in ranks.items()},
        alphas={end: _number("alpha_pattern", alpha) for end, alpha in alphas.items()},
        targets=tuple(map(str, targets)) if isinstance(targets, list) else None,
        excluded=tuple(map(str, excluded)) if isinstance(excluded, list) else (),
        excluded_by_expression=isinstance(excluded, str) and bool(excluded),
        layers=_layers(fields.get("layers_to_transform")),
    )


def _pattern(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Values by ends of modules' names."""
    found: dict[str, Any] = {str(end): value for end, value in (fields.get(name) or {}).items()}
    unread = [end for end in found if not _SUFFIX.fullmatch(end)]
    if unread:
        raise ValueError(f"{name} has the regular expression {unread[0]!r}; only ends of names are read")
    return found


def _layers(value: Any) -> frozenset[int] | None:
    """`layers_to_transform`: a number, or some; as to PEFT, none at all means all."""
    if value is None or value == []:
        return None
    return frozenset(
        _whole("layers_to_transform", layer, 0) for layer in (value if isinstance(value, list) else [value])
    )


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, and no finite number")
    return float(value)
