"""`headrace dlq`: jobs that used up their attempts, each lost with a worker."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from cli.jobs import Json, Url, connected, each, readable, report
from cli.output import Exit, Failure, err, out, print_json

if TYPE_CHECKING:
    from headrace import Client

app = typer.Typer(
    name="dlq",
    help="Dead letters: jobs that used up their attempts, each lost with a worker. They stay until somebody replays or "
    "purges them.",
    no_args_is_help=True,
)

Model = Annotated[str | None, typer.Option("--model", "-m", help="Only this model's.")]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant's.")]
OlderThan = Annotated[
    float | None, typer.Option(min=0, help="Only those that ended at least so many seconds ago.", metavar="SECONDS")
]
Jobs = Annotated[list[str] | None, typer.Argument(help="Ids of dead letters.", metavar="[JOB]...", parser=readable)]
All = Annotated[bool, typer.Option("--all", help="Every dead letter that the other options leave.")]


@app.command("list")
def list_dead(
    model: Model = None,
    tenant: Tenant = None,
    older_than: OlderThan = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most dead letters to print.")] = 20,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List dead letters, newest first."""
    with connected(url) as client:
        found = client.dead_letters(model=model, tenant=tenant, older_than_s=older_than, page_size=min(limit + 1, 100))
        jobs = list(islice(found, limit))
        more = bool(jobs) and next(found, None) is not None
    if as_json:
        print_json([job.model_dump(mode="json", exclude_none=True) for job in jobs])
        return
    from headrace.contract import utc_now

    from cli.render import dead_letters

    out.print(dead_letters(jobs, utc_now(), out.width) if jobs else "no dead letters", soft_wrap=True)
    if more:
        err.print("[dim]there are more: --limit N[/]", soft_wrap=True)


@app.command("show")
def show(
    job: Annotated[str, typer.Argument(help="Id of the dead letter.", metavar="JOB", parser=readable)],
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Print a dead letter and the attempts that it lost: where, when, and with how many other jobs.

    Few companions in the last ones say that the job itself kills its workers; many in all of them, that it may have
    been unlucky.
    """
    with connected(url) as client:
        letter = client.dead_letter(job)
    if as_json:
        print_json(letter.model_dump(mode="json", exclude_none=True))
        return
    from cli.render import whole

    out.print(whole(letter), soft_wrap=True)
    for lost in letter.lost_attempts:
        out.print(
            f"attempt {lost.attempt} lost {lost.lost_at:%Y-%m-%d %H:%M:%S} on {lost.worker}"
            f" with {_others(lost.companions)}",
            soft_wrap=True,
        )


def _others(companions: int) -> str:
    """Who was lost together with a job."""
    return {0: "no other job", 1: "one other job"}.get(companions, f"{companions} other jobs")


@app.command("replay")
def replay(
    jobs: Jobs = None,
    every: All = False,
    model: Model = None,
    tenant: Tenant = None,
    older_than: OlderThan = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Enqueue dead letters again, their attempts counted from 0. What is known of the lost ones is kept.

    Example: headrace dlq replay --all --model smollm2-135m
    """
    with connected(url) as client:
        chosen = _chosen(client, jobs, every, model, tenant, older_than)
        if not chosen:
            _nothing(as_json)
            return
        report(*each(chosen, client.replay), as_json)


@app.command("purge")
def purge(
    jobs: Jobs = None,
    every: All = False,
    model: Model = None,
    tenant: Tenant = None,
    older_than: OlderThan = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Delete dead letters for good, with all that is kept of them.

    Example: headrace dlq purge --all --older-than 604800 --yes
    """
    from headrace.counting import counted

    with connected(url) as client:
        chosen = _chosen(client, jobs, every, model, tenant, older_than)
        if not chosen:
            _nothing(as_json)
            return
        missing = 0
        if jobs and not yes:
            found, missing = each(jobs, client.dead_letter)
            chosen = [letter.id for letter in found]
        question = f"delete {counted(len(chosen), 'dead letter')} for good?"
        if chosen and not yes and not typer.confirm(question, err=True):
            raise typer.Exit(Exit.FAILED)
        purged, gone = each(chosen, client.purge)
        report(purged, missing + gone, as_json)


def _chosen(
    client: Client,
    jobs: list[str] | None,
    every: bool,
    model: str | None,
    tenant: str | None,
    older_than: float | None,
) -> list[str]:
    """The ids that a command means: those that were named, or all that the filters leave."""
    filtered = model is not None or tenant is not None or older_than is not None
    if bool(jobs) == every or (jobs and filtered):
        raise Failure("name dead letters, or give --all with filters", "headrace dlq --help", Exit.USAGE)
    if jobs:
        return jobs
    return [job.id for job in client.dead_letters(model=model, tenant=tenant, older_than_s=older_than)]


def _nothing(as_json: bool) -> None:
    """There is no dead letter that a command could mean."""
    if as_json:
        print_json([])
    else:
        out.print("no dead letters")
