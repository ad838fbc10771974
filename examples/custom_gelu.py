"""A GELU of one's own in a model: compiled, checked, compared with torch, and generating tokens.

Run it from the repository's root: `python examples/custom_gelu.py [MODEL]`. Without a model, a small one with random
weights is made: it needs no download, and its words mean nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional

from engine import LLM, SamplingParams
from kernels.custom import CustomOp, NoCompiler

VOCABULARY = 256


def save_small_model(directory: Path) -> None:
    """A Gemma of three layers: its MLPs are gated by GELU."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import GemmaConfig, GemmaForCausalLM
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = GemmaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4)  # logits that differ clearly
    model.save_pretrained(directory)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))  # noqa: S106
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "w1", "eos_token": "w2"}))


def show_op(op: CustomOp) -> None:
    """What the compiler says of it, and how far it is from torch's."""
    print(f"{op.name}({op.signature})")
    for architecture, used in op.resources.items():
        print(
            f"  {architecture}: {used.registers} registers, {used.spill_bytes} bytes spilled, "
            f"{used.stack_bytes} of stack, {used.shared_bytes} of shared memory"
        )
    x = torch.linspace(-8, 8, 20_000).view(100, 200)
    op(x)  # torch prepares a new operation at its first call
    start_s = time.perf_counter()
    ours = op(x)
    took_ms = (time.perf_counter() - start_s) * 1e3
    difference = (ours - functional.gelu(x, approximate="tanh")).abs().max().item()
    print(f"  largest difference from torch's: {difference:.1e} ({x.numel()} elements in {took_ms:.1f} ms)")
    checks = torch.library.opcheck(op.torch_op, (x,))
    print("  torch.library.opcheck: " + ", ".join(f"{name} {result}" for name, result in checks.items()))


def generate(model: Path | str, op: CustomOp, prompt: str) -> bool:
    """Whether the model says the same with the operation in place."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(model, dtype="float32", kv_cache_bytes=32 * 2**20) as llm:
        built_in = llm.generate(prompt, params)[0].text
        llm.register_op("gelu", op)
        start_s = time.perf_counter()
        custom = llm.generate(prompt, params)[0].text
        took_s = time.perf_counter() - start_s
    print(f"built-in: {built_in!r}\ncustom:   {custom!r} ({params.max_tokens} tokens in {took_s:.2f} s)")
    return built_in == custom


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="a model whose MLPs use GELU, as Gemma or GPT-2")
    parser.add_argument("--prompt", default="w7 w12 w80 w33")
    options = parser.parse_args()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    warnings.simplefilter("ignore")
    try:
        op = CustomOp(Path(__file__).with_name("my_gelu.cu"))
        show_op(op)
    except NoCompiler as error:
        parser.exit(1, f"{error}; install g++, or name a compiler in CXX\n")
    if options.model is not None:
        return 0 if generate(options.model, op, options.prompt) else 1
    with tempfile.TemporaryDirectory() as directory:
        save_small_model(Path(directory))
        return 0 if generate(Path(directory), op, options.prompt) else 1


if __name__ == "__main__":
    raise SystemExit(main())
