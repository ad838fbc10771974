"""Where the time of one step on the CPU goes, phase by phase, at several batch sizes and contexts.

    python -m bench.step [MODEL] [--quantization int8] [--threads 2]

A case is B requests with a context of C tokens, of which the last N are computed: `64x200` decodes one token of each,
`1x512x512` computes a whole prompt. The phases are those of the fastest of its steps, on one thread, waiting included;
"outside" is what is left to Python.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from engine.batch import Batch
from engine.config import EngineConfig
from engine.cpu.model import CpuModel
from engine.memory.storage import HostStorage
from kernels.cpu.step import PHASES
from kernels.sampling import SamplingBatch

CASES = ("1x200", "8x200", "64x200", "64x450", "1x512x512")
PAGE_SIZE = 16
LEAST_S = 1.0
"""Each case is repeated for at least this long."""


def decoding(requests: int, context: int, rows: int, vocab_size: int) -> Batch:
    """A step of `rows` tokens of each request, on pages in no order; the last of each is sampled greedily."""
    draw = random.Random(0)
    each = -(-context // PAGE_SIZE)
    pages = draw.sample(range(requests * each), requests * each)
    zeros = (0,) * requests
    return Batch(
        token_ids=[draw.randrange(vocab_size) for _ in range(requests * rows)],
        positions=list(range(context - rows, context)) * requests,
        slots=[],
        query_start=[rows * i for i in range(requests + 1)],
        context_len=[context] * requests,
        block_tables=[pages[i * each : (i + 1) * each] for i in range(requests)],
        sample_rows=[rows * (i + 1) - 1 for i in range(requests)],
        sampling=SamplingBatch(zeros, zeros, (1.0,) * requests, zeros, zeros, (context,) * requests, ((),) * requests),
    )


def measured(model: CpuModel, batch: Batch) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step, and the phases of the fastest."""
    model.execute(batch)
    model.phase_seconds()
    times: list[float] = []
    fastest: dict[str, float] = {}
    while sum(times) < LEAST_S or len(times) < 3:
        began = time.perf_counter()
        model.execute(batch)
        times.append(time.perf_counter() - began)
        phases = model.phase_seconds()
        if times[-1] == min(times):
            fastest = phases
    return times, fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--quantization", choices=("none", "int8", "gguf"), default="none")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8", "fp8"), default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cases", nargs="+", default=CASES)
    asked = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in asked.cases]
    rows = [case[0] * (case[2] if len(case) > 2 else 1) for case in cases]
    model = CpuModel.load(
        EngineConfig(
            asked.model,
            quantization=asked.quantization,
            kv_cache_dtype=asked.kv_cache_dtype,
            threads=asked.threads,
            max_num_batched_tokens=max(rows),
        )
    )
    layout = model.kv_layout(PAGE_SIZE)
    units = layout.units_for(max(case[0] * -(-case[1] // PAGE_SIZE) for case in cases))
    storage = model.allocate_kv(layout, units, units)
    assert isinstance(storage, HostStorage)
    storage.arena.bytes[:] = 1  # memory that was never written is one page of zeros, which stays in the cache
    print(
        f"{'case':>10} {'median ms':>10} {'fastest':>8}  " + " ".join(f"{phase:>9}" for phase in (*PHASES, "outside"))
    )
    for name, case in zip(asked.cases, cases, strict=True):
        batch = decoding(case[0], case[1], case[2] if len(case) > 2 else 1, model.info.vocab_size)
        times, phases = measured(model, batch)
        parts = [*phases.values(), min(times) - sum(phases.values())]
        print(
            f"{name:>10} {1e3 * statistics.median(times):10.2f} {1e3 * min(times):8.2f}  "
            + " ".join(f"{1e3 * part:9.3f}" for part in parts)
        )
    model.close()


if __name__ == "__main__":
    main()
