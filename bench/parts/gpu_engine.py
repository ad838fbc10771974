"""The whole engine on random weights of a common shape: tokens per second, beside vLLM's where it is installed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.parts.gpu_kernels import Bench
from bench.parts.gpu_report import Line
from engine import LLM, SamplingParams
from engine.gpu import GpuModel
from engine.recording import HostRecorder
from kernels.protocol import Kernels
from kernels.reference import ReferenceKernels

MODES: dict[str, dict[str, Any]] = {
    "graphs and overlap": {"enforce_eager": False, "overlap": True},
    "graphs": {"enforce_eager": False, "overlap": False},
    "overlap": {"enforce_eager": True, "overlap": True},
    "neither": {"enforce_eager": True, "overlap": False},
}
"""What makes steps faster, by itself and together; on the CPU recorded steps are done again."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's structure, and the load that it gets."""

    name: str
    family: str
    config: dict[str, Any]
    requests: int
    prompt_tokens: int
    output_tokens: int
    modes: tuple[str, ...] = tuple(MODES)


def shapes(*, tiny: bool) -> list[Shape]:
    """What is run, the smallest first."""
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99, "max_position_embeddings": 99}  # fmt: skip
        return [Shape("tiny Qwen3", "Qwen3", sizes, 2, 5, 3, ("graphs and overlap", "neither"))]
    qwen = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    return [
        Shape("Qwen3-0.6B", "Qwen3", qwen | {"max_position_embeddings": 4096}, 64, 256, 128),
        Shape(
            "Llama-3-8B",
            "Llama",
            llama | {"max_position_embeddings": 4096},
            64,
            256,
            128,
            ("graphs and overlap", "neither"),
        ),
    ]


def run(shape: Shape, folder: Path, bench: Bench) -> Iterator[Line]:
    """Tokens per second of the engine in each mode; on the CPU, whether its tokens are the reference's; then vLLM."""
    path = _save(shape, folder, bench)
    on_cpu = bench.device.type == "cpu"
    expected = _engine(shape, path, bench, ReferenceKernels(bench.device), MODES["neither"])[1] if on_cpu else None
    for mode in shape.modes:
        speed, tokens = _engine(shape, path, bench, bench.kernels, MODES[mode])
        yield Line("engine", f"{shape.name}, {shape.requests} requests, {mode}", speed, "tokens/s")
        if expected is not None:
            yield Line("engine", f"{shape.name}, greedy, {mode}",
                       sum(a != b for a, b in zip(tokens, expected, strict=True)),
                       "requests that differ", failed=tokens != expected)  # fmt: skip
    if not on_cpu and find_spec("vllm") is not None:
        yield Line("vLLM", f"{shape.name}, {shape.requests} requests", _vllm(shape, path), "tokens/s")


def _save(shape: Shape, folder: Path, bench: Bench) -> Path:
    """A directory with random weights, and a tokenizer whose words stand for their own ids."""
    import transformers
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel

    path = folder / shape.name.replace(" ", "-")
    config = getattr(transformers, f"{shape.family}Config")(**shape.config, bos_token_id=1, eos_token_id=2)
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    with torch.device("meta"):
        model = getattr(transformers, f"{shape.family}ForCausalLM")(config).to(dtype)
    model.to_empty(device=bench.device)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1) if "norm" in name else parameter.normal_(std=0.2 if bench.tiny else 0.02)
    model.save_pretrained(path)
    words = Tokenizer(WordLevel({f"<{i}>": i for i in range(shape.config["vocab_size"])}, unk_token="<0>"))
    words.decoder = decoders.ByteLevel()
    (path / "tokenizer.json").write_text(words.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<1>", "eos_token": "<2>"}))
    return path


def _prompts(shape: Shape) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    size = (shape.requests, shape.prompt_tokens)
    found: list[list[int]] = torch.randint(3, shape.config["vocab_size"], size, generator=generator).tolist()
    return found


def _engine(
    shape: Shape, path: Path, bench: Bench, kernels: Kernels, mode: Mapping[str, Any]
) -> tuple[float, list[list[int]]]:
    """Tokens per second over all requests at once, and the tokens."""
    on_cpu = bench.device.type == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    with ExitStack() as patches:
        if on_cpu:  # where another model would be loaded, and other kernels chosen
            recorder = None if mode["enforce_eager"] else HostRecorder()
            patches.enter_context(patch("engine.llm.load_model", partial(GpuModel.load, recorder=recorder)))
            patches.enter_context(patch("engine.runner.get_kernels", lambda *_: kernels))
        llm = patches.enter_context(
            LLM(
                path,
                device=str(bench.device),
                dtype=dtype,
                max_num_seqs=shape.requests,
                enable_prefix_caching=False,
                **mode,
            )
        )
        params = SamplingParams(max_tokens=shape.output_tokens, temperature=0.0, ignore_eos=True)
        llm.generate(_prompts(shape)[:1], params)
        begin = time.perf_counter()
        outputs = llm.generate(_prompts(shape), params)
        elapsed_s = time.perf_counter() - begin
    tokens = [list(output.token_ids) for output in outputs]
    return sum(map(len, tokens)) / elapsed_s, tokens


def _vllm(shape: Shape, path: Path) -> float:
    import vllm

    llm = vllm.LLM(str(path), max_num_seqs=shape.requests, max_model_len=2048, gpu_memory_utilization=0.5)
    params = vllm.SamplingParams(max_tokens=shape.output_tokens, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in _prompts(shape)]
    llm.generate(prompts[:1], params, use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - begin)
