"""Custom operations in the place of a model's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.model import load_model
from engine.model.ops import REPLACEABLE
from kernels.custom import CustomOp, op
from kernels.custom.compilers import find_cpp
from tests.unit.engine.model.random_models import save_random_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(3, 12))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gated by GELU."""
    _, path = save_random_model(tmp_path_factory.mktemp("gated"), "Gemma", tie_word_embeddings=False)
    return Path(path)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GELU without a gate."""
    return Path(save_random_model(tmp_path_factory.mktemp("plain"), "GPT2", n_embd=48, n_layer=2, n_head=4)[1])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that the CPU library serves."""
    return Path(save_random_model(tmp_path_factory.mktemp("llama"), "Llama")[1])


def load(path: Path, **config: Any) -> LLM:
    return LLM(path, dtype="float32", device="cpu", kv_cache_bytes=2**23, cache=path.parent / "cache", **config)


def tokens(llm: LLM) -> tuple[int, ...]:
    return tuple(llm.generate(PROMPT, PARAMS)[0].token_ids)


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def relu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.relu() * up


class Counted:
    """An operation and how often it was called with content."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += x.device.type != "meta"
        return self.function(x)


@pytest.mark.parametrize("model", ["gemma", "gpt2"])
def test_the_same_gelu_gives_the_same_tokens(model: str, request: pytest.FixtureRequest) -> None:
    same = Counted(gelu)
    with load(request.getfixturevalue(model)) as llm:
        built_in = tokens(llm)
        llm.register_op("gelu", same)
        assert tokens(llm) == built_in
        assert same.calls > 0
        llm.register_op("gelu", torch.zeros_like)
        assert tokens(llm) != built_in


def test_a_kernel_from_a_cuda_source_generates(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_cpp() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(op, "find_compiler", lambda: None)
    own = CustomOp(Path(__file__).parents[3] / "examples" / "my_gelu.cu")
    with load(gemma) as llm:
        built_in = tokens(llm)
        llm.register_op("gelu", own)
        assert tokens(llm) == built_in
        assert llm.config.ops == {"gelu": own}


def test_a_model_of_the_cpu_library_is_loaded_again_by_torch(llama: Path) -> None:
    with load(llama) as llm:
        before = tokens(llm)
        llm.register_op("silu_and_mul", relu_and_mul)
        after = tokens(llm)
        assert after != before
        llm.sleep()
        llm.wake()
        assert tokens(llm) == after
    with load(llama, ops={"silu_and_mul": relu_and_mul}) as llm:
        assert tokens(llm) == after


def test_experts_have_it_too(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    path = Path(save_random_model(tmp_path, "Mixtral", **experts)[1])
    same = Counted(functional.silu)
    with load(path) as llm:
        before = tokens(llm)
        llm.register_op("silu", same)
        assert tokens(llm) == before
    assert same.calls > 0


@pytest.mark.parametrize(
    ("name", "op_", "error"),
    [
        ("rms_norm", gelu, f"no operation 'rms_norm' can be replaced. These can: .*{'.*'.join(REPLACEABLE)}"),
        ("silu", functional.silu, "this model computes no silu: of its operations, gelu or gelu_and_mul can be"),
        ("gelu", lambda x: x[:1], r"gelu must make \[3, 8\] of torch.float32 from \[3, 8\], and makes \[1, 8\]"),
        ("gelu", lambda x: x.double(), "and makes .* of torch.float64"),
        ("gelu", lambda x: None, "and makes NoneType"),
        ("gelu_and_mul", gelu, r"must make \[3, 8\] of torch.float32 from \[3, 16\], and makes \[3, 16\]"),
        ("gelu", lambda x, y: x, "the operation refuses it"),
    ],
)
def test_one_that_doesnt_fit_is_refused_and_changes_nothing(gemma: Path, name: str, op_: Any, error: str) -> None:
    with load(gemma) as llm:
        before = tokens(llm)
        with pytest.raises(ValueError, match=error):
            llm.register_op(name, op_)
        assert not llm.config.ops
        assert tokens(llm) == before


def test_a_part_and_the_whole_exclude_each_other(gemma: Path) -> None:
    with load(gemma, ops={"gelu": gelu}) as llm, pytest.raises(ValueError, match="gelu is a part of gelu_and_mul"):
        llm.register_op("gelu_and_mul", relu_and_mul)


def test_another_type_than_the_models(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_cpp() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(op, "find_compiler", lambda: None)
    own = CustomOp(Path(__file__).parents[3] / "examples" / "my_gelu.cu")
    config = EngineConfig(str(gemma), cache=gemma.parent, dtype="bfloat16", device="cpu", ops={"gelu": own})
    with pytest.raises(ValueError, match=r"x must be torch\.float32, not torch\.bfloat16\. Write it for that type, or"):
        load_model(config)


def test_without_a_compiler_the_built_in_one_stays(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = CustomOp(Path(__file__).parents[3] / "examples" / "my_gelu.cu", reference=gelu)
    monkeypatch.setattr(own, "obstacle", lambda device: "it wasn't compiled")
    with load(gemma) as llm:
        before = tokens(llm)
        llm.register_op("gelu", own)
        assert tokens(llm) == before
    assert re.search("built-in gelu stays in the place of the custom one: it wasn't compiled", caplog.text)


def test_models_without_operations_of_their_own(gemma: Path) -> None:
    with LLM("fake") as llm, pytest.raises(ValueError, match="the fake model has no operations"):
        llm.register_op("gelu", gelu)
