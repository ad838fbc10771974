from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.pooling_files import read_pooling
from engine.model.spec import UnsupportedModel
from engine.pooling import Pooling

PARTS = ("Transformer", "Pooling", "Normalize")


def write_modules(
    directory: Path, pooling: dict[str, Any], parts: tuple[str, ...] = PARTS, folder: str = "1_Pooling"
) -> None:
    """As `sentence-transformers` does."""
    modules = [
        {"idx": i, "name": str(i), "path": folder if part == "Pooling" else "", "type": f"sentence_transformers.{part}"}
        for i, part in enumerate(parts)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_a_directory_that_says_nothing(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_cls_token": True}, "first"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_kinds_in_old_and_new_files(tmp_path: Path, config: dict[str, Any], kind: Any) -> None:
    write_modules(tmp_path, config)
    assert read_pooling(tmp_path) == Pooling(kind, normalised=True)
    write_modules(tmp_path, config, parts=PARTS[:2])
    assert read_pooling(tmp_path) == Pooling(kind, normalised=False)


@pytest.mark.parametrize(
    ("config", "parts", "folder", "said"),
    [
        ({"pooling_mode_max_tokens": True}, PARTS, "1_Pooling", "pools by max"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, PARTS, "1_Pooling", "cls and mean"),
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"), "1_Pooling", "Transformer, Pooling, Dense"),
        ({"pooling_mode": "mean"}, ("Transformer",), "1_Pooling", "has Transformer; read are"),
        ({"pooling_mode": "mean"}, PARTS, "../1_Pooling", "no folder of its own"),
        ({"pooling_mode": "mean"}, PARTS, "2_Pooling", "not readable"),
    ],
)
def test_what_would_change_the_vector_is_refused(
    tmp_path: Path, config: dict[str, Any], parts: tuple[str, ...], folder: str, said: str
) -> None:
    write_modules(tmp_path, config, parts, folder)
    with pytest.raises(UnsupportedModel, match=said):
        read_pooling(tmp_path)
