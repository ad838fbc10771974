"""What the sections of the results page are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from bench.limits import Limits

Data = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Rows under a head, as Markdown."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]


def middle(side: Data, metric: str) -> float:
    """The median of a metric over a side's samples."""
    values: list[float] = [sample[metric] for sample in side["samples"]]
    return median(values)


def spread(side: Data, metric: str) -> str:
    """The lowest and the highest of them."""
    values = [sample[metric] for sample in side["samples"]]
    return f"{min(values):.4g} to {max(values):.4g}"


def limits_line(part: Data) -> str:
    """What the machine could do at best in the same run."""
    found = Limits(**part["limits"])
    return (
        f"In the same run the machine read {found.read_bytes_per_s / 1e9:.0f} GB/s with {found.threads:g} threads"
        f" ({found.read_one_thread_bytes_per_s / 1e9:.0f} with one) and computed {found.bf16_ops_per_s / 1e9:.0f} bf16"
        f" and {found.int8_ops_per_s / 1e9:.0f} int8 Gop/s, as torch measures it."
    )
