"""The decoder against `transformers` on the same random weights, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.assembly import build_weights
from engine.model.decoder import Decoder
from engine.model.hf_dir import HFDirectory, HFWeights
from kernels.kv import UNIT_BYTES, KVLayout
from kernels.protocol import AttentionMetadata
from kernels.reference import ReferenceKernels
from tests.unit.engine.model.random_models import VARIANTS

Save = Callable[..., tuple[Any, Path]]
CPU = torch.device("cpu")
PAGE_SIZE = 4
MODELS = [pytest.param(family, config, id=name) for name, (family, config) in VARIANTS.items()]


class Stepper:
    """One sequence, stepped by hand through a decoder."""

    def __init__(self, directory: HFDirectory) -> None:
        spec, kernels = directory.spec, ReferenceKernels(CPU)
        weights = build_weights(
            spec,
            HFWeights(directory),
            kernels,
            dtype=torch.float32,
            device=CPU,
            vocab_size=spec.vocab_rows,
            positions=256,
        )
        self.decoder = Decoder(spec, weights, kernels, torch.float32)
        self.layout = KVLayout(spec.layers, spec.kv_heads, spec.head_size, 4, PAGE_SIZE)
        storage = torch.zeros(self.layout.units_for(64) * UNIT_BYTES, dtype=torch.uint8)
        self.kv = kernels.kv_views(storage, self.layout, torch.float32)
        self.table = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
        self.known = 0

    @torch.inference_mode()
    def step(self, tokens: list[int], rows: list[int] | None = None) -> Tensor:
        """Logits of `rows` (all by default) of `tokens`, which follow those of the steps before."""
        positions = list(range(self.known, self.known + len(tokens)))
        self.known += len(tokens)
        slots = [self.table[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in positions]

        def i32(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        meta = AttentionMetadata(
            positions=i32(positions),
            slots=i32(slots),
            query_start=i32([0, len(tokens)]),
            context_len=i32([self.known]),
            block_table=i32([self.table]),
            max_query=len(tokens),
            max_context=self.known,
            layout=self.layout,
        )
        return self.decoder.forward(i32(tokens), meta, self.kv, i32(range(len(tokens)) if rows is None else rows))


@pytest.mark.parametrize(("family", "config"), MODELS)
def test_logits_equal_those_of_transformers(save_random: Save, family: str, config: dict[str, Any]) -> None:
    model, path = save_random(family, **config)
    tokens = torch.randint(0, 96, (1, 70), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = model(tokens).logits[0]
    assert expected.std() > 0.5, "weights too small to tell a right decoder from a wrong one"

    stepper, ids = Stepper(HFDirectory(path)), tokens[0].tolist()
    chunks = [ids[:31], ids[31:32], ids[32:67], *[[token] for token in ids[67:]]]
    got = torch.cat([stepper.step(chunk) for chunk in chunks])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("rows", [[2, 0], [4], []])
def test_only_the_wanted_rows_get_logits(save_random: Save, rows: list[int]) -> None:
    _, path = save_random("Llama")
    directory = HFDirectory(path)
    every = Stepper(directory).step([3, 4, 5, 6, 7])
    some = Stepper(directory).step([3, 4, 5, 6, 7], rows)
    assert some.shape == (len(rows), 96)
    torch.testing.assert_close(some, every[rows])
