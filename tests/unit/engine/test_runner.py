"""What is torch's own of the model on its device; `test_models` has what every implementation does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.runner import TorchModel
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.engine.stepping import Run, allocate, finish, prompts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return save_random_model(tmp_path_factory.mktemp("model"), "Qwen3")


def load(saved: tuple[Any, Path], tmp_path: Path, **config: Any) -> TorchModel:
    return TorchModel.load(EngineConfig(str(saved[1]), cache=tmp_path, **({"dtype": "float32"} | config)))


class TestChoices:
    def test_half_types_run(self, saved: tuple[Any, Path], tmp_path: Path) -> None:
        for dtype in ("bfloat16", "float16"):
            model = load(saved, tmp_path, dtype=dtype)
            allocate(model)
            assert model.info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
            (output,) = finish(model, [Run(prompts()[4])], 3, 64)
            assert len(output) == 3

    def test_threads(self, saved: tuple[Any, Path], tmp_path: Path) -> None:
        before = torch.get_num_threads()
        try:
            load(saved, tmp_path, threads=1)
            assert torch.get_num_threads() == 1
        finally:
            torch.set_num_threads(before)
