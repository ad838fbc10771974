"""The pooling of a directory of `sentence-transformers`: `modules.json` and what it names. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from engine.model.spec import UnsupportedModel
from engine.pooling import Pooling

MODULES = "modules.json"

_KINDS: dict[str, Literal["last", "mean", "first"]] = {
    "lasttoken": "last",
    "mean": "mean",
    "cls": "first",
}
_SWITCHES = {f"pooling_mode_{mode}_token{'s' if mode == 'mean' else ''}": mode for mode in ("cls", "mean")}
_SWITCHES |= {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def read_pooling(directory: Path) -> Pooling | None:
    """How the directory's model makes a vector; None if it says nothing."""
    if not (directory / MODULES).is_file():
        return None
    modules = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in _json(directory / MODULES)]
    strange = [kind for kind, _ in modules if kind not in ("Transformer", "Pooling", "Normalize")]
    paths = [path for kind, path in modules if kind == "Pooling"]
    if strange or len(paths) != 1:
        raise UnsupportedModel(
            f"{directory / MODULES} has {', '.join(kind for kind, _ in modules)}; read are a Transformer, one Pooling"
            " and Normalize"
        )
    if Path(paths[0]).name != paths[0]:
        raise UnsupportedModel(f"{directory / MODULES} names {paths[0]!r}: no folder of its own directory")
    modes = _modes(_json(directory / paths[0] / "config.json"))
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise UnsupportedModel(f"{directory / paths[0]} pools by {' and '.join(modes)}; read are {', '.join(_KINDS)}")
    return Pooling(_KINDS[modes[0]], normalised=any(kind == "Normalize" for kind, _ in modules))


def _modes(config: dict[str, Any]) -> list[str]:
    """The ways of pooling that are switched on; newer files name one."""
    named = config.get("pooling_mode")
    if named is not None:
        return [named] if isinstance(named, str) else list(map(str, named))
    return [mode for switch, mode in _SWITCHES.items() if config.get(switch)]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} is not readable as JSON: {error}") from error
