"""`python -m kernels.triton.checks [--write] [CASE]`: the table; fails when a kernel breaks a limit."""

from __future__ import annotations

import argparse
import sys

from kernels.triton.checks import table
from kernels.triton.checks.cases import cases
from kernels.triton.configs import ARCHITECTURES


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile every kernel for every architecture, without a GPU.")
    parser.add_argument("--write", action="store_true", help="store what loops load and kernels take as the new bounds")
    parser.add_argument("case", nargs="?", default="", help="only cases whose names contain this")
    options = parser.parse_args()
    stored, found, failed = table.stored_bounds(), [], 0
    print(table.HEADER)  # noqa: T201
    for case in cases():
        if options.case not in case.name:
            continue
        for architecture in ARCHITECTURES:
            if architecture in case.lacking:
                continue
            for row in table.rows(case, architecture):
                bounds = row.bounds if options.write else stored.get(row.key)
                failures = row.failures(bounds)
                failed += bool(failures)
                found.append(row)
                print(table.render(row, failures), flush=True)  # noqa: T201
    if options.write and not options.case:
        table.write_bounds(found)
    print(f"{len(found)} kernels, {failed} of them break a limit")  # noqa: T201
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
