"""Jobs as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from headrace.contract import Job

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
    ("time_to_first_token_ms", "first token"),
    ("generation_time_ms", "generation"),
    ("mean_itl_ms", "per token"),
    ("commit_time_ms", "commit"),
    ("total_time_ms", "total"),
)


def status_text(job: Job) -> Text:
    return Text(job.status.value, STYLES[job.status.value])


def ms(value: float | None) -> str:
    """A duration with the digits that matter."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


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
        shown = [(label, getattr(job.timings, name)) for name, label in TIMINGS]
        table.add_row("[dim]time[/]", ", ".join(f"{label} {ms(value)}" for label, value in shown if value is not None))
        if job.timings.tokens_per_second is not None:
            batch = f", batch of {job.timings.mean_batch_size:.1f}" if job.timings.mean_batch_size else ""
            table.add_row("[dim]speed[/]", f"{job.timings.tokens_per_second:.1f} tokens/s{batch}")
    if job.worker:
        table.add_row("[dim]worker[/]", escape(job.worker))
    return table


def whole(job: Job) -> RenderableType:
    """A job with its text."""
    return facts(job) if job.result is None else Lines(Text(job.result.text), Text(), facts(job))


def one_line(text: str, width: int) -> str:
    """A text's beginning on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def listing(jobs: Sequence[Job], now: datetime) -> Table:
    """Jobs, one a line; the model is shown if there are several."""
    models = len({job.model for job in jobs}) > 1
    table = Table(box=None, header_style="bold", pad_edge=False)
    widths = {"Job": 36, "Status": 9, **({"Model": 8} if models else {}), "Age": 6, "Total": 7}
    for name, width in widths.items():
        table.add_column(name, no_wrap=True, min_width=width)
    table.add_column("Text", no_wrap=True, overflow="ellipsis")
    for job in jobs:
        outcome = one_line(job.result.text, 80) if job.result else job.error.code.value if job.error else ""
        table.add_row(
            job.id,
            status_text(job),
            *([escape(job.model)] if models else []),
            age((now - job.created_at).total_seconds()),
            ms(job.timings.total_time_ms) if job.timings else "-",
            escape(outcome),
        )
    return table


def age(seconds: float) -> str:
    """How long ago, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
