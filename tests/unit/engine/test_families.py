"""Greedy tokens of every family against `transformers`, in float32: prompts in chunks beside requests that decode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.runner import TorchModel
from tests.unit.engine.model.random_models import VARIANTS, save_random_model
from tests.unit.engine.stepping import Run, allocate, finish, prompts

FAMILIES = (
    "llama3-rope", "mistral-window", "qwen2-window", "qwen3-yarn", "gemma", "gemma2", "gemma3", "phi3", "gpt2",
    "mixtral", "qwen3-moe",
)  # fmt: skip


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(tmp_path: Path, variant: str) -> None:
    family, config = VARIANTS[variant]
    reference, path = save_random_model(tmp_path, family, **config)
    expected = []
    for prompt in prompts():
        with torch.inference_mode():
            whole = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, min_new_tokens=12,
                do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        expected.append(whole[0, len(prompt) :].tolist())
    model = TorchModel.load(EngineConfig(str(path), cache=tmp_path, dtype="float32"))
    allocate(model)
    assert finish(model, [Run(prompt) for prompt in prompts()], 12, chunk=7) == expected
    model.close()
