"""Jobs as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from headrace.tracing import trace_id
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from headrace.contract import Job, Timings

STYLES = {
    "queued": "yellow",
    "running": "cyan",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
    "expired": "magenta",
}
TIMINGS = (
    ("queue_time_ms", "queued"),
    ("prefill_time_ms", "prefill"),
    ("mean_itl_ms", "between tokens"),
    ("total_time_ms", "total"),
)
"""What is shown of a job's timings, with its label; the JSON has them all."""
GAP = "  "
TEXT_COLUMNS = 12
"""The least that a listing shows of a text."""


def status_text(job: Job) -> Text:
    return Text(job.status.value, STYLES[job.status.value])


def ms(value: float | None) -> str:
    """A duration with the digits that matter."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


def durations(timings: Timings) -> list[str]:
    """Where a job's time went, each part with its label."""
    values = [(label, getattr(timings, name)) for name, label in TIMINGS]
    return [f"{label} {ms(value)}" for label, value in values if value is not None]


def facts(job: Job) -> RenderableType:
    """Everything about a job but its text: status, tokens, where the time went."""
    table = Table.grid(padding=(0, 2))
    table.add_row("[dim]job[/]", job.id)
    status = status_text(job)
    if job.cancel_requested and not job.status.terminal:
        status.append(" (stopping)", "dim")
    if job.attempt > 1:
        status.append(f" (attempt {job.attempt} of {job.max_attempts})", "dim")
    table.add_row("[dim]status[/]", status)
    if job.error is not None:
        table.add_row("[dim]error[/]", Text(f"{job.error.code}: {job.error.message}", "red"))
    table.add_row("[dim]model[/]", escape(job.model))
    if job.result is not None:
        usage, why = job.result.usage, job.result.finish_reason or "-"
        cached = f", {usage.cached_tokens} of them cached" if usage.cached_tokens else ""
        table.add_row(
            "[dim]tokens[/]", f"{usage.prompt_tokens} in{cached}, {usage.completion_tokens} out (ended by {why})"
        )
    if job.timings is not None:
        table.add_row("[dim]time[/]", ", ".join(durations(job.timings)))
        if job.timings.tokens_per_second is not None:
            batch = f", batch of {job.timings.mean_batch_size:.1f}" if job.timings.mean_batch_size else ""
            table.add_row("[dim]speed[/]", f"{job.timings.tokens_per_second:.1f} tokens/s{batch}")
    if job.worker:
        table.add_row("[dim]worker[/]", escape(job.worker))
    if job.traceparent:
        table.add_row("[dim]trace[/]", trace_id(job.traceparent))
    return table


def whole(job: Job) -> RenderableType:
    """A job with its text, or its texts."""
    if job.result is None:
        return facts(job)
    choices = job.result.choices
    texts = [Text(job.result.text)]
    if choices:
        texts = [Text.assemble((f"[{one.index}] ", "dim"), one.text) for one in choices]
    return Lines(*texts, Text(), facts(job))


def one_line(text: str, width: int) -> str:
    """A text's beginning on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def listing(jobs: Sequence[Job], now: datetime, width: int) -> Text:
    """Jobs, one a line of `width` columns: texts are cut, nothing else is. The model is shown if there are several."""
    models = len({job.model for job in jobs}) > 1
    names = ("Job", "Status", *(["Model"] if models else []), "Age", "Total", "Text")
    rows = [[Text(name, "bold") for name in names]]
    for job in jobs:
        outcome = job.result.text if job.result else job.error.code.value if job.error else ""
        rows.append(
            [
                Text(job.id),
                status_text(job),
                *([Text(job.model)] if models else []),
                Text(age((now - job.created_at).total_seconds())),
                Text(ms(job.timings.total_time_ms) if job.timings else "-"),
                Text(one_line(outcome, 80)),
            ]
        )
    return _columns(rows, width)


def dead_letters(jobs: Sequence[Job], now: datetime, width: int) -> Text:
    """Jobs that used their attempts up, one a line: when that was, and with whom the last of them was lost."""
    rows = [[Text(name, "bold") for name in ("Job", "Model", "Tenant", "Died", "Attempts", "Last worker")]]
    for job in jobs:
        died = age((now - job.finished_at).total_seconds()) if job.finished_at else "-"
        cells = (job.id, job.model, job.tenant, died, f"{job.attempt} of {job.max_attempts}", job.worker or "-")
        rows.append([Text(cell) for cell in cells])
    return _columns(rows, width)


def _columns(rows: list[list[Text]], width: int) -> Text:
    """Rows of `width` columns; the last cell is cut, nothing else is."""
    widths = [max(cell.cell_len for cell in column) for column in list(zip(*rows, strict=True))[:-1]]
    room = max(width - sum(widths) - len(GAP) * len(widths), TEXT_COLUMNS)
    for row in rows:
        for cell, columns in zip(row, widths, strict=False):
            cell.pad_right(columns - cell.cell_len)
        row[-1].truncate(room, overflow="ellipsis")
    return Text("\n").join(Text(GAP).join(row) for row in rows)


def age(seconds: float) -> str:
    """How long ago, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
