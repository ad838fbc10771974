"""One look at a GPU: are the kernels right there, how near are they to what it can do, and what does the engine make
of them. `python bench/gpu_check.py`; without a GPU `--device cpu --tiny` runs the same code interpreted."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    ROOT = Path(__file__).parents[1]
    sys.path[0] = str(ROOT)  # as a script this folder comes first
    sys.path.insert(1, str(ROOT / "client"))

if TYPE_CHECKING:
    from bench.parts.gpu_report import Line

MOST_S = 270
"""No further model is begun after so long: everything has to be over in ten minutes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that time allows, print a table, and fail if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to interpret the kernels")
    parser.add_argument("--tiny", action="store_true", help="small shapes: does it run at all")
    parser.add_argument("--no-engine", action="store_true", help="only the kernels")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated: before the imports below
    if find_spec("triton") is None:
        parser.exit(1, "Triton isn't installed: `make install` brings it\n")
    from bench.parts import gpu_engine, gpu_kernels
    from bench.parts.gpu_report import machine, table

    began = time.monotonic()
    bench = gpu_kernels.Bench.on(options.device, tiny=options.tiny)
    print(machine(bench.device))
    lines: list[Line] = list(gpu_kernels.correctness(bench))
    lines += gpu_kernels.speeds(bench)
    if not options.no_engine:
        with tempfile.TemporaryDirectory(prefix="headrace-gpu-check-") as folder:
            for shape in gpu_engine.shapes(tiny=options.tiny):
                if time.monotonic() - began < MOST_S:
                    lines += gpu_engine.run(shape, Path(folder), bench)
    print(table(lines))
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(line.failed for line in lines))


if __name__ == "__main__":
    sys.exit(main())
