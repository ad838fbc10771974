"""Jobs as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
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


def listing(jobs: Iterable[Job], now: datetime) -> Table:
    """Jobs, one a line."""
    table = Table(box=None, header_style="bold")
    table.add_column("Job", no_wrap=True, min_width=36)
    for name in ("Status", "Model", "Age", "Tokens", "Total"):
        table.add_column(name, no_wrap=True)
    table.add_column("Text", no_wrap=True, overflow="ellipsis")
    for job in jobs:
        result = job.result
        table.add_row(
            job.id,
            status_text(job),
            escape(job.model),
            age((now - job.created_at).total_seconds()),
            str(result.usage.completion_tokens) if result else "-",
            ms(job.timings.total_time_ms) if job.timings else "-",
            escape(one_line(result.text, 60)) if result else (job.error.code.value if job.error else ""),
        )
    return table


def age(seconds: float) -> str:
    """How long ago, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
