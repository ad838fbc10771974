"""`headrace demo`: the whole thing once, from nothing to results, in a home that is thrown away."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cli.invocation import command
from cli.output import Exit, Failure, err, out

if TYPE_CHECKING:
    import threading

    from headrace.contract import Job

POLL_S = 0.2


def demo(
    model: Annotated[
        str | None, typer.Option(help="A catalogue name, a Hugging Face directory, a GGUF file, or `fake`.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens for each job.")] = 64,
    timeout: Annotated[float, typer.Option(min=1, help="Most seconds for all jobs together.")] = 300,
) -> None:
    """Start everything on free ports, let another process submit 16 jobs, print their texts and timings, stop.

    Nothing is left behind but the model in the cache.

    Exit codes: 0 every job succeeded, 1 one didn't, or something could not run, 130 interrupted.
    """
    from cli.bringup import Plan, Screen, Stack
    from cli.instance import sole
    from cli.signals import interrupts
    from settings import settings_with

    with _scratch() as home:
        settings = settings_with(
            home=home,
            model={"model_path": model} if model else None,
            api={"port": 0, "auth": "none"},
            worker={"metrics_port": 0, "drain_s": 0},
            flower_port=0,
        )
        screen = Screen(quiet=True)
        began_s = time.monotonic()
        with sole(home), interrupts() as interrupt:
            stack = Stack.plan(Plan(settings, broker_port=0), screen, interrupt)
            try:
                screen.report("starting the broker, the ledger, the API, a worker and Flower")
                stack.start()
                screen.report(f"ready after {time.monotonic() - began_s:.1f} s: API {stack.at.api_url}")
                prompts = _produce(stack.at.api_url, settings.model.name, max_tokens)
                jobs = _follow(stack.at.api_url, list(prompts), timeout, interrupt.event)
            except KeyboardInterrupt:
                raise typer.Exit(Exit.INTERRUPTED) from None
            finally:
                stack.stop(patient=False)
        out.print(_results(jobs, prompts))
        out.print(_summary(jobs))
        if any(job.status.value != "succeeded" for job in jobs):
            raise Failure("not every job succeeded", f"the services' logs: {home / 'logs'}")
    out.print(f"\nNext, to keep it running:  [bold]{escape(command())} up[/]", soft_wrap=True)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A home that is removed at the end, unless something failed whose logs tell why."""
    home = Path(tempfile.mkdtemp(prefix="headrace-demo-"))
    try:
        yield home
    except BaseException as error:
        if isinstance(error, typer.Exit) or not any(home.glob("logs/*.log")):
            shutil.rmtree(home)
        raise
    shutil.rmtree(home)


def _produce(api_url: str, model: str, max_tokens: int) -> dict[str, str]:
    """Let a process of its own submit the jobs; their prompts by job id."""
    program = Path(__file__).with_name("demo_producer.py")
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(program), api_url, model, str(max_tokens)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise Failure(f"the producer failed:\n{done.stderr.strip()}")
    submitted = [json.loads(line) for line in done.stdout.splitlines()]
    return {item["id"]: item["prompt"] for item in submitted}


def _follow(api_url: str, ids: list[str], timeout_s: float, interrupted: threading.Event) -> list[Job]:
    """Show the jobs' progress until all have ended; they in the order of their submission."""
    from headrace import Client

    deadline_s = time.monotonic() + timeout_s
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Client(api_url) as client, Progress(*columns, console=err) as progress:
        bar = progress.add_task("jobs", total=len(ids))
        while True:
            seen = {job.id: job for job in client.jobs() if job.id in ids}
            states = [job.status.value for job in seen.values()]
            ended = sum(job.status.terminal for job in seen.values())
            text = f"{states.count('queued')} queued, {states.count('running')} running, {ended} ended"
            progress.update(bar, completed=ended, description=text)
            if ended == len(ids):
                return [seen[job_id] for job_id in ids]
            if time.monotonic() > deadline_s:
                raise Failure(f"after {timeout_s:.0f} s only {ended} of {len(ids)} jobs have ended")
            if interrupted.wait(POLL_S):
                raise KeyboardInterrupt


def _results(jobs: list[Job], prompts: dict[str, str]) -> Table:
    from headrace.counting import counted

    from cli.render import durations, status_text

    table = Table("", "Prompt and text", "Outcome, tokens, timings", show_lines=True)
    table.columns[2].no_wrap = True
    for number, job in enumerate(jobs, 1):
        body = Text(prompts[job.id], "bold")
        if job.result:
            body.append("\n" + " ".join(job.result.text.split()), "not bold")
        if job.error:
            body.append(f"\n{job.error.code}: {job.error.message}", "red")
        facts = [status_text(job)]
        if job.result:
            usage = job.result.usage
            facts.append(Text(f"{counted(usage.prompt_tokens, 'token')} in, {usage.completion_tokens} out"))
        if job.timings:
            facts += [Text(line, "dim") for line in durations(job.timings)]
            if job.timings.mean_batch_size:
                facts.append(Text(f"batch of {job.timings.mean_batch_size:.1f}", "dim"))
        table.add_row(str(number), body, Text("\n").join(facts))
    return table


def _summary(jobs: list[Job]) -> str:
    from headrace.counting import counted

    tokens = sum(job.result.usage.completion_tokens for job in jobs if job.result)
    began = min(job.created_at for job in jobs)
    ended = max(job.finished_at or job.created_at for job in jobs)
    seconds = max((ended - began).total_seconds(), 1e-3)
    good = sum(job.status.value == "succeeded" for job in jobs)
    return (
        f"{good} of {counted(len(jobs), 'job')} succeeded: {counted(tokens, 'token')} in {seconds:.1f} s, "
        f"{tokens / seconds:.0f} tokens/s"
    )
