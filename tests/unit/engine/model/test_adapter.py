"""Adapters' files: what PEFT writes is read, and whatever doesn't fit the model is refused before anything runs."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.model import open_adapters, open_files
from engine.model.adapter import Adapter, stack
from engine.model.peft_config import UnsupportedAdapter
from tests.unit.engine.model.random_adapters import LINEAR, save_random_adapter
from tests.unit.engine.model.random_models import save_random_model

A, B = "lora_A.weight", "lora_B.weight"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return save_random_model(tmp_path_factory.mktemp("base"), "Llama")


@pytest.fixture
def directory(model: tuple[Any, Path], tmp_path: Path) -> Path:
    save_random_adapter(tmp_path / "adapter", model[0], LINEAR[:2])
    return tmp_path / "adapter"


def read(model: tuple[Any, Path], directory: Path) -> Adapter:
    config = EngineConfig(str(model[1]), cache=directory.parent, adapters={"mine": directory})
    (adapter,) = open_adapters(config, open_files(config))
    return adapter


def configure(directory: Path, **fields: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(directory: Path, **tensors: Tensor | None) -> None:
    """Put tensors in the place of others of the first layer's q, or none at all."""
    path = directory / "adapter_model.safetensors"
    held = load_file(path)
    for side, tensor in tensors.items():
        held.pop(f"{Q}.lora_{side}.weight")
        if tensor is not None:
            held[f"{Q}.lora_{side}.weight"] = tensor
    path.unlink()
    save_file(held, path)


def add(directory: Path, *names: str) -> None:
    path = directory / "adapter_model.safetensors"
    held = load_file(path) | {name: torch.zeros(4, 4) for name in names}
    path.unlink()
    save_file(held, path)


def test_pairs_have_the_names_of_the_matrices_that_they_belong_to(model: tuple[Any, Path], directory: Path) -> None:
    adapter = read(model, directory)
    assert set(adapter.pairs) == {f"{layer}.{part}" for layer in range(3) for part in "qk"}
    pair = adapter.pairs["1.k"]
    assert (pair.rank, pair.scale, pair.shrink.shape, pair.expand.shape) == (4, 2.0, (4, 48), (32, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_read(model: tuple[Any, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    save_random_adapter(tmp_path / "half", model[0], dtype=dtype)
    held = load_file(tmp_path / "half" / "adapter_model.safetensors")
    pair = read(model, tmp_path / "half").pairs["0.q"]
    assert np.array_equal(pair.shrink.float32(), held[f"{Q}.{A}"].float().numpy())


def test_the_scale_is_that_of_peft(model: tuple[Any, Path], directory: Path) -> None:
    configure(directory, lora_alpha=6)
    assert read(model, directory).pairs["0.q"].scale == 1.5
    configure(directory, use_rslora=True)
    assert read(model, directory).pairs["0.q"].scale == 3.0
    configure(directory, use_rslora=False, alpha_pattern={"layers.0.self_attn.q_proj": 8, "k_proj": 2.0})
    pairs = read(model, directory).pairs
    assert (pairs["0.q"].scale, pairs["1.q"].scale, pairs["0.k"].scale) == (2.0, 1.5, 0.5)


def test_modules_may_have_ranks_of_their_own(model: tuple[Any, Path], directory: Path) -> None:
    change(directory, A=torch.ones(7, 48), B=torch.ones(96, 7))
    with pytest.raises(UnsupportedAdapter, match=r"q_proj has the rank 7, and adapter_config\.json says 4"):
        read(model, directory)
    configure(directory, rank_pattern={"model.layers.0.self_attn.q_proj": 7})
    pairs = read(model, directory).pairs
    assert (pairs["0.q"].rank, pairs["0.q"].scale, pairs["1.q"].rank) == (7, 8 / 7, 4)


@pytest.mark.parametrize("targets", [r".*\.(q|k)_proj", "all-linear", None, ["q_proj", "k_proj", "c_attn"]], ids=str)
def test_targets_may_be_an_expression_a_word_or_names_of_other_models_too(
    model: tuple[Any, Path], directory: Path, targets: object
) -> None:
    configure(directory, target_modules=targets)
    assert len(read(model, directory).pairs) == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"layers_to_transform": [0, 1, 2]},
        {"layers_to_transform": []},
        {"exclude_modules": ["o_proj", "lm_head"], "target_modules": ["q_proj", "k_proj", "o_proj"]},
        {"exclude_modules": r".*vision.*", "target_modules": ["q_proj", "k_proj", "o_proj"]},
        {"rank_pattern": {"k_proj": 4, "self_attn.k_proj": 4, "v_proj": 9}},
        {"alpha_pattern": {"k_proj": 8, "self_attn.k_proj": 8.0}},
    ],
    ids=str,
)
def test_what_the_file_and_the_configuration_agree_on_is_served(
    model: tuple[Any, Path], directory: Path, fields: dict[str, Any]
) -> None:
    configure(directory, **fields)
    assert len(read(model, directory).pairs) == 6


def test_an_adapter_of_some_layers(model: tuple[Any, Path], directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    held = {name: tensor for name, tensor in load_file(path).items() if ".layers.1." in name}
    path.unlink()
    save_file(held, path)
    for layers in ([1], 1):
        configure(directory, layers_to_transform=layers)
        assert set(read(model, directory).pairs) == {"1.q", "1.k"}


def test_a_field_that_is_there_twice_is_refused(model: tuple[Any, Path], directory: Path) -> None:
    path = directory / "adapter_config.json"
    path.write_text(path.read_text().replace("{", '{"r": 4, ', 1))
    with pytest.raises(UnsupportedAdapter, match=r"not readable as JSON .* 'r' is there more than once"):
        read(model, directory)


def test_an_expression_of_the_file_is_never_run(model: tuple[Any, Path], directory: Path) -> None:
    """One that takes for ever to match costs nothing."""
    configure(directory, target_modules="(.*)*" * 30 + "x", exclude_modules="(.*)*" * 30 + "y")
    assert len(read(model, directory).pairs) == 6


def test_joined_matrices_are_cut_to_their_parts(tmp_path: Path) -> None:
    base = save_random_model(tmp_path, "Phi3", pad_token_id=0)
    save_random_adapter(tmp_path / "adapter", base[0], ("qkv_proj", "gate_up_proj"))
    adapter = read(base, tmp_path / "adapter")
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    whole = held["base_model.model.model.layers.2.self_attn.qkv_proj.lora_B.weight"].numpy()
    widths = [adapter.pairs[f"2.{part}"].expand.shape[0] for part in "qkv"]
    assert sum(widths) == len(whole)
    stacked = stack([adapter], ["2.q", "2.k", "2.v"], widths)
    assert stacked is not None
    assert np.array_equal(stacked[1][0], whole * 2)
    assert np.array_equal(stacked[0][0, 0], stacked[0][0, 2])


def test_adapters_of_different_ranks_and_parts_are_padded_with_zeros(model: tuple[Any, Path], tmp_path: Path) -> None:
    save_random_adapter(tmp_path / "a", model[0], ("q_proj",), rank=2)
    save_random_adapter(tmp_path / "b", model[0], ("v_proj",), rank=5)
    adapters = [read(model, tmp_path / name) for name in "ab"]
    stacked = stack(adapters, ["0.q", "0.k", "0.v"], [96, 32, 32])
    assert stacked is not None
    shrink, expand = stacked
    assert (shrink.shape, expand.shape) == ((2, 3, 5, 48), (2, 160, 5))
    assert shrink[0, 0, :2].all()
    assert shrink[1, 2].all()
    assert (np.count_nonzero(shrink), np.count_nonzero(expand)) == (2 * 48 + 5 * 48, 96 * 2 + 32 * 5)
    assert stack(adapters, ["0.o"], [48]) is None


def test_the_revision_follows_the_files(model: tuple[Any, Path], directory: Path) -> None:
    before = read(model, directory).revision
    assert read(model, directory).revision == before
    configure(directory, lora_alpha=1)
    scaled = read(model, directory).revision
    change(directory, A=torch.ones(4, 48))
    assert len({before, scaled, read(model, directory).revision}) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "of the type 'IA3', and only LORA"),
        ({"use_dora": True}, "asks for the magnitudes of DoRA"),
        ({"bias": "all"}, r"asks for biases of its own \(bias='all'\)"),
        ({"lora_bias": True}, "biases of its own"),
        ({"modules_to_save": ["lm_head"]}, r"whole modules of its own \(modules_to_save\)"),
        ({"init_lora_weights": "pissa_niter_4"}, "other base weights"),
        ({"init_lora_weights": [1]}, "other base weights"),
        ({"layer_replication": [[0, 2]]}, "layers that are there several times"),
        ({"use_dora": True, "bias": "lora_only"}, "DoRA, biases of its own"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": 10**400}, "makes no sense"),
        ({"r": 0}, "the rank r is 0"),
        ({"r": "8"}, "the rank r is '8'"),
        ({"alpha_pattern": {"(q|k)_proj": 2}}, r"alpha_pattern has the regular expression '\(q|k\)_proj'"),
        ({"alpha_pattern": [1]}, "makes no sense"),
        ({"alpha_pattern": {"q_proj": 2, "0.self_attn.q_proj": 3}}, "alpha_pattern .* 2 by 'q_proj' and 3 by '0.self"),
        ({"rank_pattern": {"(q|k)_proj": 2}}, r"rank_pattern has the regular expression '\(q|k\)_proj'"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is 0"),
        ({"rank_pattern": {"q_proj": 4, "self_attn.q_proj": 5}}, "rank_pattern .* 4 by 'q_proj' and 5 by 'self_attn"),
        ({"rank_pattern": {"k_proj": 5}}, "k_proj has the rank 4, and adapter_config.json says 5"),
        ({"target_modules": ["q_proj", "k_proj", "o_proj"]}, "targets o_proj, and .* has no tensors of it"),
        ({"target_modules": ["q_proj"]}, "has tensors of .*k_proj, which target_modules of .* leaves out"),
        (
            {"layers_to_transform": [0, 2]},
            r"tensors of model\.layers\.1\..*, which layers_to_transform of .* leaves out",
        ),
        ({"layers_to_transform": 1}, "which layers_to_transform"),
        ({"layers_to_transform": [0, 1, 2, 7]}, "has layer 7 in layers_to_transform, and .* no tensors of it"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform is '0'"),
        ({"layers_to_transform": True}, "layers_to_transform is True"),
        ({"exclude_modules": ["k_proj"]}, "has tensors of .*k_proj, which exclude_modules of .* leaves out"),
        ({"exclude_modules": ["2.self_attn.q_proj"]}, r"layers\.2\.self_attn\.q_proj, which exclude_modules"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_served(
    model: tuple[Any, Path], directory: Path, fields: dict[str, Any], message: str
) -> None:
    configure(directory, **fields)
    with pytest.raises(UnsupportedAdapter, match=rf"adapter 'mine' can't be served: .*{message}"):
        read(model, directory)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"[" * 100_000, b'"LORA"', b" " * (2**20 + 1)], ids=len)
def test_a_configuration_that_is_none(model: tuple[Any, Path], directory: Path, content: bytes) -> None:
    (directory / "adapter_config.json").write_bytes(content)
    with pytest.raises(UnsupportedAdapter, match=r"adapter_config\.json (is not readable|has 1048577 bytes)"):
        read(model, directory)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"A": torch.ones(4, 47)},
            r"q_proj has the shapes \(4, 47\) and \(96, 4\); .* wants \(rank, 48\) and \(96, rank\)",
        ),
        ({"A": torch.ones(4, 48, 1)}, r"has the shapes \(4, 48, 1\)"),
        ({"A": torch.ones(48)}, r"has the shapes \(48,\)"),
        ({"B": torch.ones(95, 4)}, r"and \(95, 4\)"),
        ({"B": torch.ones(96, 5)}, r"and \(96, 5\)"),
        ({"A": torch.ones(0, 48), "B": torch.ones(96, 0)}, "the rank 0, and served are 1 to 512"),
        ({"A": torch.ones(513, 48), "B": torch.ones(96, 513)}, "the rank 513"),
        ({"A": torch.full((4, 48), torch.nan)}, "values that are no numbers"),
        ({"B": torch.full((96, 4), torch.inf)}, "values that are no numbers"),
        ({"A": None}, r"has no lora_A for model\.layers\.0\.self_attn\.q_proj"),
        ({"B": None}, "has no lora_B"),
        ({"A": torch.ones(4, 48, dtype=torch.int8)}, "has the type I8"),
    ],
    ids=["in", "three dimensions", "one", "out", "ranks", "zero", "large", "nan", "inf", "no A", "no B", "int8"],
)
def test_tensors_that_do_not_fit(
    model: tuple[Any, Path], directory: Path, tensors: dict[str, Tensor | None], message: str
) -> None:
    change(directory, **tensors)
    with pytest.raises(UnsupportedAdapter, match=message):
        read(model, directory)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("base_model.model.lm_head", "it changes lm_head"),
        ("base_model.model.model.embed_tokens", "it changes model.embed_tokens"),
        ("base_model.model.model.layers.3.self_attn.q_proj", r"it changes model\.layers\.3\.self_attn\.q_proj, and"),
        ("base_model.model.model.layers.99999999.self_attn.q_proj", "it changes"),
        ("base_model.model.model.layers.0.mlp.experts.0.w1", "it changes"),
        ("base_model.model.other.layers.0.self_attn.q_proj", "it changes other"),
    ],
)
def test_modules_that_the_model_does_not_have(
    model: tuple[Any, Path], directory: Path, module: str, message: str
) -> None:
    add(directory, f"{module}.{A}", f"{module}.{B}")
    with pytest.raises(UnsupportedAdapter, match=message):
        read(model, directory)


@pytest.mark.parametrize("name", [f"{Q}.lora_magnitude_vector", f"{Q}.bias", "lora_A.weight", f"{Q}.{A}.more"])
def test_tensors_that_are_no_part_of_a_pair(model: tuple[Any, Path], directory: Path, name: str) -> None:
    add(directory, name)
    with pytest.raises(UnsupportedAdapter, match="which is no part of a pair"):
        read(model, directory)


def test_one_side_by_two_names_is_refused(model: tuple[Any, Path], directory: Path) -> None:
    add(directory, f"{Q}.lora_A.default.weight")
    with pytest.raises(UnsupportedAdapter, match=r"holds both .* which one is meant"):
        read(model, directory)


def test_a_scale_that_leaves_no_numbers_is_refused(model: tuple[Any, Path], directory: Path) -> None:
    configure(directory, lora_alpha=1e39)
    with pytest.raises(UnsupportedAdapter, match=r"is scaled by .* which its values don't stand"):
        read(model, directory)


def test_the_same_matrix_by_two_names_is_refused(model: tuple[Any, Path], directory: Path) -> None:
    module = "base_model.model.layers.0.self_attn.q_proj"
    path = directory / "adapter_model.safetensors"
    held = load_file(path) | {f"{module}.{A}": torch.ones(4, 48), f"{module}.{B}": torch.ones(96, 4)}
    path.unlink()
    save_file(held, path)
    with pytest.raises(UnsupportedAdapter, match=r"more than one pair for the model.s 0\.q"):
        read(model, directory)


def test_a_pickle_is_never_read(model: tuple[Any, Path], directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(UnsupportedAdapter, match=r"no adapter_model\.safetensors: adapter_model\.bin is a pickle"):
        read(model, directory)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, struct.pack("<Q", 2**40), struct.pack("<Q", 2) + b"{}"], ids=len)
def test_a_file_of_tensors_that_is_none(model: tuple[Any, Path], directory: Path, content: bytes) -> None:
    (directory / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedAdapter, match="adapter 'mine' can't be served"):
        read(model, directory)


def test_a_directory_that_is_none(model: tuple[Any, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAdapter, match=r"holds no adapter_config\.json"):
        read(model, tmp_path / "nowhere")


def test_what_peft_calls_linear_is_what_is_read(model: tuple[Any, Path]) -> None:
    """The modules of a layer that `all-linear` means are those that are served."""
    layer = model[0].model.layers[0]
    linear = {name.rpartition(".")[2] for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    assert linear == set(LINEAR)
