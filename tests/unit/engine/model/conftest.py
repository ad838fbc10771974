from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.model.random_models import save_random_model


@pytest.fixture
def save_random(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """`save_random("Qwen3", tie_word_embeddings=True)` -> the transformers model in float32, and its directory."""
    return partial(save_random_model, tmp_path)
