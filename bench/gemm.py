"""The matrix products of one step of a model, beside what this machine can read and multiply.

    python -m bench.gemm [--threads 2] [--formats BF16,INT8] [--rows 1,64]

The weights of all layers and the head are distinct, so that they come from memory as in a real step. Both limits are
measured in the same run. "Of the limit" is the time that reading the weights once or multiplying would take at best,
whichever is longer, as a share of the time taken.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import convert, library
from kernels.cpu.buffers import huge_bytes
from kernels.cpu.library import Library, Team
from kernels.cpu.limits import measure
from kernels.cpu.linear import Quantised, Then, linear, quantise
from kernels.cpu.packing import Format, Packed, packed_bytes

LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""SmolLM2-135M: qkv, output, gate with up, down; each [outputs, inputs]."""
HEAD_SHAPE = (49152, 576)


def model_weights(lib: Library, form: Format) -> tuple[list[Packed], NDArray[np.uint8]]:
    """All layers and the head, one behind the other, and the memory that they lie in.

    The bytes are no model's: they make numbers around 1 in every format, and speed depends on nothing else.
    """
    shapes = [*LAYER_SHAPES * LAYERS, HEAD_SHAPE]
    sizes = [packed_bytes(lib, form, *shape) for shape in shapes]
    memory = huge_bytes(sum(sizes))
    memory.view(np.uint16)[:] = 0x3C00 + np.arange(memory.nbytes // 2, dtype=np.uint32) % 97
    ends = np.cumsum(sizes)
    packed = [
        Packed(form, *shape, memory[end - size : end]) for shape, size, end in zip(shapes, sizes, ends, strict=True)
    ]
    return packed, memory


def activations(lib: Library, form: Format, rows: int, inputs: int) -> NDArray[Any] | Quantised:
    """[rows, inputs] as the format takes them."""
    floats = np.random.default_rng(rows).standard_normal((rows, inputs)).astype(np.float32)
    if form is Format.F32:
        return floats
    return convert.float_to_bf16(lib, floats) if form is Format.BF16 else quantise(lib, floats, form.scale_inputs)


def step(team: Team, weights: Sequence[Packed], rows: int) -> Callable[[], None]:
    """One pass of `rows` rows through all weights; results go where a model's would: to the same few buffers."""
    form = weights[0].format
    x = {inputs: activations(team.library, form, rows, inputs) for inputs in {packed.inputs for packed in weights}}
    to = {outputs: np.empty((rows, outputs), np.uint16) for outputs in {packed.outputs for packed in weights}}

    def run() -> None:
        for packed in weights:
            linear(team, packed, x[packed.inputs], Then.STORE_BF16, to=to[packed.outputs])

    return run


def seconds(work: Callable[[], None], rounds: int) -> float:
    """The median time of `work` after one run to warm up."""
    work()
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def report(team: Team, form: Format, row_counts: Sequence[int], rounds: int) -> None:
    """Print one table."""
    weights, memory = model_weights(team.library, form)
    limits = measure(team, form, memory)
    products = sum(packed.outputs * packed.inputs for packed in weights)
    read_s = memory.nbytes / limits.read_bytes_s
    print(
        f"\n{form.name}, {team.library.isa}, {team.threads} threads: {memory.nbytes / 1e6:.0f} MB at "
        f"{limits.read_bytes_s / 1e9:.1f} GB/s are {read_s * 1e3:.2f} ms; {limits.operations_s / 1e9:.0f} Gop/s"
    )
    print(f"{'rows':>6} {'ms':>9} {'Gop/s':>8} {'of the limit':>13}")
    for rows in row_counts:
        taken_s = seconds(step(team, weights, rows), rounds)
        operations = 2 * products * rows
        best_s = max(read_s, operations / limits.operations_s)
        print(f"{rows:>6} {taken_s * 1e3:>9.2f} {operations / taken_s / 1e9:>8.0f} {best_s / taken_s:>12.0%}")


def main() -> None:
    """Measure what the command line names."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--formats", default=",".join(form.name for form in Format))
    arguments.add_argument("--rows", default="1,2,4,8,16,32,64,128")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--isa", choices=library.ISAS)
    chosen = arguments.parse_args()
    with Team(library.load(chosen.isa), chosen.threads) as team:
        for name in chosen.formats.split(","):
            report(team, Format[name.upper()], [int(rows) for rows in chosen.rows.split(",")], chosen.rounds)


if __name__ == "__main__":
    main()
