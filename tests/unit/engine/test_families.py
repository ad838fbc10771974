"""Greedy tokens of every family against `transformers`, in float32: prompts in chunks beside requests that decode."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.runner import TorchModel
from tests.unit.engine.model.random_models import VARIANTS, greedy_tokens, save_random_model
from tests.unit.engine.stepping import Run, allocate, finish, prompts

FAMILIES = (
    "llama3-rope", "mistral-window", "qwen2-window", "qwen3-yarn", "gemma", "gemma2", "gemma3", "phi3", "gpt2",
    "mixtral", "qwen3-moe",
)  # fmt: skip


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, variant: str) -> None:
    family, config = VARIANTS[variant]
    reference, path = save_random_model(tmp_path, family, **config)
    expected = greedy_tokens(reference, prompts(), 12)
    model = TorchModel.load(EngineConfig(str(path), cache=tmp_path, dtype="float32"))
    allocate(model)
    assert finish(model, [Run(prompt) for prompt in prompts()], 12, chunk=7) == expected
    model.close()
