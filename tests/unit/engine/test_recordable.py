"""A decode step of the Triton kernels on tensors without memory: whatever asked the host for a number would fail."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("there is no Triton for this machine", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel can't be compiled", allow_module_level=True)

from engine.batch import Batch
from engine.config import EngineConfig
from engine.model import open_adapters, open_files
from engine.model.decoder import Decoder
from engine.runner import load_decoder
from engine.staging import layout, views
from engine.step_tensors import NO_SAMPLING, StepTensors, padded_numbers_of
from kernels.kv import UNIT_BYTES, KVLayout
from kernels.triton.checks.offline import compiling
from kernels.triton.kernels import TritonKernels
from tests.unit.engine.model.random_adapters import save_random_adapter
from tests.unit.engine.model.random_models import VARIANTS, VOCAB, save_random_model

META = torch.device("meta")
SIZE, CONTEXT_TOKENS, PAGE_SIZE = 8, 64, 16


def decode(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str = "none", **sizes: int
) -> set[str]:
    """One recorded step's work on a model with an adapter, which some have; the kernels that it launches."""
    kernels = TritonKernels("sm_90")
    monkeypatch.setattr("engine.runner.get_kernels", lambda *_: kernels)
    family, changes = VARIANTS[variant]
    base, path = save_random_model(tmp_path, family, **(changes | sizes))
    save_random_adapter(tmp_path / "one", base, ("qkv_proj" if family == "Phi3" else "q_proj", "o_proj"))
    config = EngineConfig(
        str(path),
        tmp_path,
        dtype="bfloat16",
        device="cpu",
        quantization=quantization,
        adapters={"one": tmp_path / "one"},
    )
    files = open_files(config)
    decoder = load_decoder(config, files, torch.bfloat16, META, adapters=open_adapters(config, files))
    assert isinstance(decoder, Decoder)
    spec = decoder.spec
    kv = KVLayout(spec.layers, spec.kv_heads, spec.head_size, 2, PAGE_SIZE)
    views_of_kv = kernels.kv_views(
        torch.empty(UNIT_BYTES << kv.extent_order, dtype=torch.uint8, device=META), kv, torch.bfloat16
    )
    batch = Batch([5], [0], [0], [0, 1], [1], [[0]], [0], NO_SAMPLING, adapters=[1])
    parts = padded_numbers_of(batch, NO_SAMPLING, VOCAB, SIZE, CONTEXT_TOKENS // PAGE_SIZE, 0, adapters=1)
    packed = torch.empty(layout(parts)[1], dtype=torch.uint8, device=META)
    step = StepTensors.of(views(parts, packed), 1, CONTEXT_TOKENS, kv)
    with compiling("sm_90") as compiled, torch.inference_mode():
        step.take(torch.empty(SIZE, dtype=torch.int32, device=META))
        logits = decoder.logits(decoder.hidden(step.token_ids, step.meta, views_of_kv, step.rows, step.adapted))
        chosen = kernels.choose(logits, step.columns)
    assert (logits.shape, logits.dtype) == ((SIZE, VOCAB), torch.float32)
    assert chosen.shape == (SIZE,)
    return {kernel.name for kernel in compiled}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama-biases", "qwen3", "gemma2", "phi3-partial"])
def test_nothing_of_a_recorded_step_comes_to_the_host(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = decode(variant, tmp_path, monkeypatch)
    assert {"decode_kernel", "combine_kernel", "rotary_kernel", "rms_norm_kernel", "sample_kernel"} <= launched
    assert {"shrink_kernel", "expand_kernel"} <= launched


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "kernel"), [("int8", "int8_kernel"), ("int4", "int4_kernel")])
def test_nor_do_quantised_weights(
    quantization: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    assert kernel in decode("qwen3", tmp_path, monkeypatch, quantization, **sizes)


@pytest.mark.slow
def test_experts_come_to_the_host_which_is_why_they_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)meta"):
        decode("mixtral", tmp_path, monkeypatch)
