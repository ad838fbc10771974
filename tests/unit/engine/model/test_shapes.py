"""Files whose tensors aren't those of their configuration are refused before anything is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from bench.endurance.random_model import write_random_model
from engine import LLM
from engine.config import EngineConfig
from engine.executor import ModelFailed
from engine.model import load_model, open_weights
from engine.model.hf_dir import HFDirectory
from engine.model.shapes import shapes
from engine.model.spec import UnsupportedModel
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.kernels.isas import needs_library

Tensors = dict[str, NDArray[Any]]
QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
SERVERS = [pytest.param(16, marks=needs_library, id="library"), pytest.param(8, id="torch")]
"""By pages that the one has and the other hasn't."""
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen3", {}),
    ("Gemma2", {}),
    ("Phi3", {"pad_token_id": 0}),
    ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    ("Mixtral", {"num_local_experts": 3}),
]


def damaged(directory: Path, change: Callable[[Tensors], Any] | None = None, **config: Any) -> Path:
    """A small model with other tensors, or another configuration, than it should have."""
    path = write_random_model(directory)
    if change is not None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
    told = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(told | config))
    return path


def load(path: Path, page_size: int, **config: Any) -> None:
    asked = EngineConfig(str(path), cache=path, device="cpu", page_size=page_size, **config)
    load_model(asked).close()


@pytest.mark.parametrize(("family", "config"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_a_whole_model_has_every_tensor_and_no_other(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    model, path = save_random_model(tmp_path, family, **config)
    files = HFDirectory(path)
    weights = open_weights(files, files.spec)
    assert sum(int(np.prod(shape)) for _, shape in shapes(files.spec)) == model.num_parameters()
    assert all(weights[name].shape == shape for name, shape in shapes(files.spec))


@pytest.mark.parametrize("page_size", SERVERS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.update({QUERY: tensors[QUERY][:-1]}), r"0\.q has the shape \(63, 32\)"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY].T.copy()}), r"0\.q has the shape \(32, 64\)"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY].reshape(-1)}), r"0\.q has the shape \(2048,\)"),
        (lambda tensors: tensors.update({NORM: tensors[NORM][:16].copy()}), r"norm has the shape \(16,\)"),
        (lambda tensors: tensors.pop(QUERY), r"lack the tensor 0\.q"),
    ],
    ids=["a row less", "transposed", "flat", "a short norm", "missing"],
)
def test_a_tensor_that_is_not_as_configured_is_named(
    change: Callable[[Tensors], Any], says: str, page_size: int, tmp_path: Path
) -> None:
    """Packed as it is, a matrix of a row less would have made other tokens and no error."""
    with pytest.raises(UnsupportedModel, match=says):
        load(damaged(tmp_path / "model", change), page_size)


@pytest.mark.parametrize("page_size", SERVERS)
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_hidden_layers": 5}, r"lack the tensor 4\.attn_norm"),
        ({"num_hidden_layers": 10**9}, "1 to 4096 layers"),
        ({"vocab_size": 10**9}, "embedding has the shape"),
        ({"attention_bias": True}, r"lack the tensor 0\.q\.bias"),
        ({"rms_norm_eps": -1.0}, "norm_eps is -1.0"),
        ({"rms_norm_eps": float("nan")}, "norm_eps is nan"),
        ({"rope_theta": -10000.0}, "theta is -10000.0"),
        ({"rope_theta": "x"}, "could not convert"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "linear_factor is 0.0"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json lacks"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
    ],
    ids=str,
)
def test_a_configuration_that_the_files_do_not_bear_out_is_refused(
    config: dict[str, Any], says: str, page_size: int, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        load(damaged(tmp_path / "model", **config), page_size)


def test_blocks_are_kept_of_a_file_that_has_them(tmp_path: Path) -> None:
    """It served the model in bfloat16, and called it `gguf`."""
    with pytest.raises(ValueError, match="keeps the blocks of a GGUF file"):
        load(damaged(tmp_path / "model"), 16, quantization="gguf")


@pytest.mark.parametrize("page_size", SERVERS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_noticed_before_the_first_request(
    value: float, page_size: int, tmp_path: Path
) -> None:
    """Each request would have been answered with token 0, over and over, and no error."""

    def change(tensors: Tensors) -> None:
        tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = value

    path = damaged(tmp_path / "model", change)
    with pytest.raises(ModelFailed, match="logits are no numbers"):
        LLM(path, cache=tmp_path, device="cpu", page_size=page_size, max_seq_len=64, kv_cache_bytes=2**24)
