"""Small random adapters as PEFT writes them, and the model that each would be if it were merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_random_adapter(
    directory: Path,
    model: Any,
    targets: tuple[str, ...] = LINEAR,
    *,
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Any:
    """Write an adapter of a transformers model's modules; the model with it merged by hand: W + scale * B A."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(model)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **config}
    scale = fields["lora_alpha"] / (rank**0.5 if fields.get("use_rslora") else rank)
    tensors: dict[str, Tensor] = {}
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] not in targets or not hasattr(module, "weight"):
            continue
        transposed = not isinstance(module, nn.Linear)  # GPT-2's Conv1D has its inputs first
        outputs, inputs = module.weight.shape[::-1] if transposed else module.weight.shape
        shrink = (torch.randn(rank, inputs, generator=generator) / inputs**0.5).to(dtype)
        expand = (torch.randn(outputs, rank, generator=generator) / 2).to(dtype)
        added = scale * (expand.float() @ shrink.float())
        module.weight.data += added.T if transposed else added
        tensors[f"base_model.model.{name}.lora_A.weight"] = shrink
        tensors[f"base_model.model.{name}.lora_B.weight"] = expand
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return merged
