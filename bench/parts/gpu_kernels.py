"""The Triton kernels on a GPU: against the reference, and against the memory and the matrix units."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.parts.gpu_report import Line
from kernels.adapters import AdapterRows, Adapters
from kernels.kv import KVLayout
from kernels.protocol import Attention, AttentionMetadata, Kernels
from kernels.quantised import SCALE_BYTES
from kernels.reference import ReferenceKernels
from kernels.sampling import SamplingBatch
from kernels.triton.architecture import architecture_of
from kernels.triton.checks import interpreter
from kernels.triton.kernels import TritonKernels
from kernels.triton.linear import QuantisedLinear
from kernels.weights import GROUP, Bits, QuantisedWeight

TOLERANCE = 2e-2
"""Relative error of bfloat16 results."""
QUANTISED_TOLERANCE = 8e-2


@dataclass(frozen=True, slots=True)
class Bench:
    """A device and its kernels."""

    device: torch.device
    kernels: TritonKernels
    tiny: bool

    @classmethod
    def on(cls, name: str, *, tiny: bool) -> Bench:
        device = torch.device(name)
        if device.type == "cpu":
            interpreter.install()
            return cls(device, TritonKernels("sm_90"), tiny)
        architecture = architecture_of(device)
        if architecture is None:
            raise SystemExit(f"{torch.cuda.get_device_name(device)} is older than what the kernels are built for (8.0)")
        return cls(device, TritonKernels(architecture), tiny)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call, the median of several on a GPU."""
        if self.device.type == "cuda":
            from triton.testing import do_bench

            return float(do_bench(call, return_mode="median")) / 1000
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests with pages of their own, the last `rows` tokens of each in the step."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int
    kv_heads: int
    size: int
    norm: bool = False
    """Whether queries and keys are normalised by head."""

    def metadata(self, bench: Bench, layout: KVLayout, rows: tuple[int, ...]) -> AttentionMetadata:
        counts = [-(-context // layout.page_size) for context in self.contexts]
        pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
        tables = [[pages.pop() for _ in range(count)] for count in counts]
        positions = [list(range(c - n, c)) for n, c in zip(rows, self.contexts, strict=True)]
        slots = [
            table[p // layout.page_size] * layout.page_size + p % layout.page_size
            for table, own in zip(tables, positions, strict=True)
            for p in own
        ]

        def i32(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=bench.device)

        starts = torch.tensor([0, *rows]).cumsum(0).tolist()
        wide = [table + [0] * (max(counts) - len(table)) for table in tables]
        flat = [p for own in positions for p in own]
        return AttentionMetadata(
            i32(flat), i32(slots), i32(starts), i32(self.contexts), i32(wide), max(rows), max(self.contexts), layout
        )

    def attend(self, bench: Bench, kernels: Kernels, layout: KVLayout, qkv: Tensor, attention: Attention) -> Tensor:
        """Write all contexts, then attend with the step's rows."""
        pages = sum(-(-context // layout.page_size) for context in self.contexts)
        extents = -(-pages // layout.pages_per_extent)
        storage = torch.zeros(extents * layout.extent_bytes, dtype=torch.uint8, device=bench.device)
        kv = kernels.kv_views(storage, layout, qkv.dtype)[0]
        angles = torch.outer(torch.arange(max(self.contexts)), torch.arange(self.size // 2) * 0.01)
        table = torch.stack([angles.cos(), angles.sin()], 1).float().to(bench.device)
        meta = kernels.prepare(self.metadata(bench, layout, self.contexts), qkv.dtype)
        norm = torch.linspace(0.5, 1.5, self.size, device=bench.device) if self.norm else None
        q = kernels.rotary_kv_write(qkv, table, meta, kv, norm, norm)
        ends = torch.tensor(self.contexts).cumsum(0).tolist()
        wanted = [row for n, end in zip(self.rows, ends, strict=True) for row in range(end - n, end)]
        meta = kernels.prepare(self.metadata(bench, layout, self.rows), qkv.dtype)
        return kernels.paged_attention(q[wanted].contiguous(), kv, meta, attention)


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, over the whole tensor; infinite if anything is not a number."""
    difference = (got.double() - expected.double()).norm() / expected.double().norm()
    return float(difference) if bool(got.isfinite().all()) else math.inf


def correctness(bench: Bench) -> Iterator[Line]:
    """Each kernel beside the reference."""

    def line(name: str, got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> Line:
        found = error(got, expected)
        return Line("correct", name, found, "relative error", failed=not found < tolerance)

    mine, reference = bench.kernels, ReferenceKernels(bench.device)
    yield from _attention_lines(bench, reference, line)
    x, weight = bench.randn(5, 320), bench.randn(320, dtype=torch.float32)
    residual = bench.randn(5, 320, dtype=torch.float32)
    got, expected = (k.add_rms_norm(residual.clone(), x, weight, 1e-6, torch.bfloat16) for k in (mine, reference))
    yield line("add and RMSNorm", got[1], expected[1])
    yield line("SiLU and mul", mine.silu_and_mul(x), reference.silu_and_mul(x))
    yield line("GELU and mul", mine.gelu_and_mul(x), reference.gelu_and_mul(x))
    for name, quantised in _weights(bench, 192, 4 * GROUP):
        x = bench.randn(33, 4 * GROUP)
        got_product = QuantisedLinear(mine.architecture, quantised)(x)
        yield line(f"{name} weights", got_product, x.float() @ quantised.restored(torch.float32).T)
    yield _adapter_line(bench, line)
    yield _copy_line(bench)
    yield _sampling_line(bench, reference)


def _weights(bench: Bench, outputs: int, inputs: int) -> Iterator[tuple[str, QuantisedWeight]]:
    """Weights in each form that there is a kernel for."""
    weight = bench.randn(outputs, inputs, dtype=torch.float32) / 16
    forms: list[tuple[Bits, int]] = [(8, GROUP), (4, GROUP), (8, 32), (4, 32)]
    for bits, group in forms:
        yield f"int{bits} by {group}", QuantisedWeight.rounded(weight, bits, group)
    made = QuantisedWeight.rounded(weight, 4, 32)
    yield "int4 by 32, with minimums", QuantisedWeight(4, made.numbers, made.scales, made.zeros * 0.9)


def _adapter_line(bench: Bench, line: Callable[[str, Tensor, Tensor], Line]) -> Line:
    of_row = torch.tensor([1, -1, 0, 2, 1, 1] + [2] * 19, dtype=torch.int32, device=bench.device)
    x, out = bench.randn(len(of_row), 256), bench.randn(len(of_row), 192)
    low, high = bench.randn(3, 2, 16, 256) / 16, bench.randn(3, 192, 16) / 4
    expected = out.float()
    for row, adapter in enumerate(of_row.tolist()):
        if adapter >= 0:
            first, second = low[adapter].float() @ x[row].float()
            expected[row, :128] += high[adapter, :128].float() @ first
            expected[row, 128:] += high[adapter, 128:].float() @ second
    bench.kernels.add_adapters(x, out, AdapterRows.of(of_row, 3), Adapters.of(low, high, (128, 64)))
    return line("adapters of rank 16", out, expected)


def _copy_line(bench: Bench) -> Line:
    layout = KVLayout(4, 2, 64, 2, 16)
    storage = torch.randint(0, 256, (2 * layout.extent_bytes,), dtype=torch.uint8, device=bench.device)
    expected = storage.clone()
    source, target = [1, layout.pages_per_extent + 3], [0, 2]
    for a, b in zip(map(layout.offset_bytes, source), map(layout.offset_bytes, target), strict=True):
        expected[b : b + layout.page_bytes] = storage[a : a + layout.page_bytes]
    pages = torch.tensor([source, target], device=bench.device)
    bench.kernels.copy_pages(storage, layout, pages[0], pages[1])
    wrong = int((storage != expected).sum())
    return Line("correct", "page copy", wrong, "bytes that differ", failed=wrong > 0)


def _attention_lines(
    bench: Bench, reference: ReferenceKernels, line: Callable[[str, Tensor, Tensor, float], Line]
) -> Iterator[Line]:
    sinks = bench.randn(8, dtype=torch.float32)
    shapes = [(64, 8), (128, 2)] if bench.tiny else [(64, 8), (80, 4), (96, 8), (128, 2), (256, 1)]
    variants = {
        "": Attention(0.1),
        ", window 30": Attention(0.1, window=30),
        ", window, cap, sinks": Attention(0.1, 30, 5.0, sinks),
    }
    kinds = [None, torch.int8] + ([torch.float8_e4m3fn] if bench.kernels.architecture != "sm_80" else [])
    for size, kv_heads in shapes:
        batch = Batch((1, 1, 17), (40, 3, 33) if bench.tiny else (900, 3, 333), 8, kv_heads, size, norm=size == 128)
        qkv = bench.randn(sum(batch.contexts), 8 + 2 * kv_heads, size)
        layout = KVLayout(1, kv_heads, size, 2, 16)
        for name, variant in variants.items():
            expected = batch.attend(bench, reference, layout, qkv, variant)
            for kind in kinds if name == "" else [None]:
                kernels = TritonKernels(bench.kernels.architecture, kind)
                own = layout if kind is None else replace(layout, element_bytes=1, scale_bytes=SCALE_BYTES)
                got = batch.attend(bench, kernels, own, qkv, variant)
                kept = "" if kind is None else f", {str(kind).removeprefix('torch.')} KV"
                normed = ", normed" if batch.norm else ""
                label = f"attention {size}, {8 // kv_heads} to a key{name}{normed}{kept}"
                yield line(label, got, expected, TOLERANCE if kind is None else QUANTISED_TOLERANCE)


def _sampling_line(bench: Bench, reference: ReferenceKernels) -> Line:
    rows, vocab = (4, 500) if bench.tiny else (64, 32000)
    logits = bench.randn(rows, vocab, dtype=torch.float32) * 2
    top_k, top_p, min_p = (([0, 40, 900] * rows)[:rows], ([1.0, 0.9] * rows)[:rows], ([0.0] * 3 + [0.02]) * rows)
    seeds, nothing = tuple(range(rows)), ((),) * rows
    batch = SamplingBatch((1.0,) * rows, tuple(top_k), tuple(top_p), tuple(min_p[:rows]), seeds, (7,) * rows, nothing)
    got, expected = (k.sample(logits.clone(), batch).tokens for k in (bench.kernels, reference))
    wrong = sum(a != b for a, b in zip(got, expected, strict=True))
    return Line("correct", f"sampling, {rows} rows of {vocab}", wrong, "tokens that differ", failed=wrong > rows // 50)


def speeds(bench: Bench) -> Iterator[Line]:
    """Achieved shares of the bandwidth and of the matrix rate that plain torch reaches here."""
    n = 2**20 if bench.tiny else 2**30
    data = torch.zeros(n, dtype=torch.uint8, device=bench.device)
    bandwidth = 2 * n / bench.seconds(data.clone)
    yield Line("machine", "copy", bandwidth / 1e9, "GB/s")
    side = 128 if bench.tiny else 8192
    a = bench.randn(side, side)
    rate = 2 * side**3 / bench.seconds(lambda: a @ a)
    yield Line("machine", "bfloat16 product", rate / 1e12, "TFLOP/s")

    def by_bytes(name: str, moved: int, call: Callable[[], object]) -> Line:
        speed = moved / bench.seconds(call)
        return Line("speed", name, speed / 1e9, "GB/s", speed / bandwidth)

    requests, context = (2, 48) if bench.tiny else (64, 4096)
    decode = Batch((1,) * requests, (context,) * requests, 32, 8, 128)
    for kind, width in ((None, 2), (torch.int8, 1)):
        kernels = TritonKernels(bench.kernels.architecture, kind)
        call = _prepared(bench, kernels, decode, width)
        moved = requests * context * 8 * 2 * (128 * width + (SCALE_BYTES if kind else 0))
        yield by_bytes(f"decode {requests} x {context}, {str(kind or 'bfloat16').removeprefix('torch.')}", moved, call)
    rows = 32 if bench.tiny else 8192
    call = _prepared(bench, bench.kernels, Batch((rows,), (rows,), 32, 8, 128), 2)
    flops = 2 * rows * rows * 32 * 128
    reached = flops / bench.seconds(call)
    yield Line("speed", f"prefill of {rows}", reached / 1e12, "TFLOP/s", reached / rate)
    hidden = 128 if bench.tiny else 4096
    x, weight = bench.randn(rows, hidden), bench.randn(hidden, dtype=torch.float32)
    residual = bench.randn(rows, hidden, dtype=torch.float32)
    norm = lambda: bench.kernels.add_rms_norm(residual, x, weight, 1e-6, torch.bfloat16)  # noqa: E731
    yield by_bytes(f"add and RMSNorm {rows} x {hidden}", rows * hidden * (4 + 4 + 2 + 2), norm)
    yield by_bytes(f"SiLU and mul {rows} x {hidden // 2}", rows * hidden * 3, lambda: bench.kernels.silu_and_mul(x))
    for name, quantised in _weights(bench, hidden, hidden):
        linear, few = QuantisedLinear(bench.kernels.architecture, quantised), bench.randn(8, hidden)
        moved = quantised.numbers.nbytes + quantised.scales.nbytes
        yield by_bytes(f"{name} weights, 8 rows", moved, lambda: linear(few))  # noqa: B023


def _prepared(bench: Bench, kernels: TritonKernels, batch: Batch, width: int) -> Callable[[], object]:
    """Attention of a batch over pages of zeros, ready to be called again and again."""
    scale_bytes = SCALE_BYTES if kernels.kv_dtype else 0
    layout = KVLayout(1, batch.kv_heads, batch.size, width, 16, scale_bytes)
    pages = sum(-(-context // 16) for context in batch.contexts)
    extents = -(-pages // layout.pages_per_extent)
    storage = torch.zeros(extents * layout.extent_bytes, dtype=torch.uint8, device=bench.device)
    kv = kernels.kv_views(storage, layout, torch.bfloat16)[0]
    meta = kernels.prepare(batch.metadata(bench, layout, batch.rows), torch.bfloat16)
    q = bench.randn(sum(batch.rows), batch.heads, batch.size)
    return lambda: kernels.paged_attention(q, kv, meta, Attention(0.1))
