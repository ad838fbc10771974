"""Commands about jobs, over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.instance import api_url, default_model
from cli.invocation import command
from cli.output import Exit, Failure, err, first_line, out, print_json
from cli.params import named_params, schema_format

if TYPE_CHECKING:
    from headrace import Client, HeadraceError, JobTimeout
    from headrace.contract import Job

Url = Annotated[
    str | None,
    typer.Option("--url", help="The API. By default HEADRACE_API_URL, then the running `headrace up`.", metavar="URL"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def readable(job_id: str) -> str:
    """An id as it can stand in a URL."""
    if not job_id or job_id.encode(errors="replace").decode() != job_id:
        raise typer.BadParameter(f"{job_id!r} can't be the id of a job")
    return job_id


JobIds = Annotated[list[str], typer.Argument(help="Ids of jobs.", metavar="JOB...", parser=readable)]
JobId = Annotated[str, typer.Argument(help="Id of the job.", metavar="JOB", parser=readable)]


@contextmanager
def connected(url: str | None) -> Iterator[Client]:
    """A client of the API; what goes wrong with it is told as a Failure."""
    from headrace import Client, HeadraceError

    address = api_url(url)
    try:
        with Client(address, retries=1) as client:
            yield client
    except HeadraceError as error:
        raise _told(error, address) from None


def _told(error: HeadraceError, address: str) -> Failure:
    from headrace import ApiError, ConnectionFailed, Forbidden, NotFound, Unauthorized

    match error:
        case ConnectionFailed():
            hint = f"start one with `{command()} up`, or name it with --url or HEADRACE_API_URL"
            return Failure(f"no Headrace API answers at {address} ({error})", hint)
        case ApiError(type="api_error", status=status) if status not in (502, 503, 504):
            hint = "name the API with --url or HEADRACE_API_URL"
            return Failure(f"what answers at {address} is no Headrace API: {error.message}", hint)
        case NotFound(code="not_a_dead_letter"):
            return Failure(error.message, "`headrace dlq list` lists dead letters")
        case NotFound(code="model_not_found"):
            return Failure(error.message, "`headrace models list` lists models")
        case NotFound():
            return Failure(error.message, "`headrace jobs` lists jobs")
        case Unauthorized():
            return Failure(error.message, "set HEADRACE_API_KEY; `headrace keys create` makes a key")
        case Forbidden(code="missing_scope"):
            return Failure(error.message, "`headrace keys create --scope SCOPE` makes a key that has it")
        case ApiError():
            return Failure(error.message)
    return Failure(first_line(error))


def submit(
    prompt: Annotated[str | None, typer.Argument(help="The prompt.", metavar="[PROMPT]")] = None,
    file: Annotated[
        typer.FileText | None, typer.Option("--file", "-f", help="Read the prompt from a file; - is standard input.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="By default the running instance's.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", "-a", help="One of the model's adapters.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Send the prompt as a user's message, or as bare text to continue.")
    ] = True,
    system: Annotated[str | None, typer.Option(help="A system message in front of a chat.")] = None,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.2,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from this share of probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=-1, help="Sample from this many tokens; 0 is all.")] = 0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed gives the same text; by default it is drawn.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. May be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    n: Annotated[int, typer.Option("--n", min=1, max=16, help="So many completions of the prompt.")] = 1,
    schema: Annotated[
        typer.FileText | None, typer.Option(help="The text is JSON that follows the schema in this file.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param", "-p", help="Any other parameter of a job, e.g. logprobs=5. May be repeated.", metavar="NAME=JSON"
        ),
    ] = None,
    priority: Annotated[Literal["high", "normal", "low"], typer.Option(help="How urgent it is.")] = "normal",
    ttl: Annotated[float | None, typer.Option(min=0, help="Seconds after which it isn't wanted.")] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: the same key gives the same job.")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="On whose behalf; by default the API key's tenant, or `default`.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait for the end and print the text.")] = False,
    stream: Annotated[bool, typer.Option("--stream", "-s", help="Print the text as it comes.")] = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="Most seconds to wait; the job goes on.")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Enqueue a job and print its id; with --wait or --stream, its text and where its time went.

    Exit codes: 0 accepted (with --wait: succeeded), 1 refused or failed, 2 wrong usage, 130 interrupted (the job goes
    on). Example: headrace submit "Why is the sky blue?" --max-tokens 64 --stream
    """
    if (prompt is None) == (file is None):
        raise Failure("give the prompt as an argument or with --file", "headrace submit --help", Exit.USAGE)
    if stream and as_json:
        raise Failure("--stream prints text as it comes, so it can't go with --json", "use --wait --json", Exit.USAGE)
    if stream and n > 1:
        raise Failure("--stream prints one text as it comes, so it can't go with --n", "use --wait", Exit.USAGE)
    text = prompt if file is None else _read(file)
    if not text:
        raise Failure("the prompt is empty", code=Exit.USAGE)
    messages = None
    if chat:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
    elif system:
        raise Failure("--system goes with a chat, not with --raw", code=Exit.USAGE)
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
        "ignore_eos": ignore_eos or None,
        "n": n if n > 1 else None,
        "response_format": schema and schema_format(schema),
        "adapter": adapter,
        "priority": priority,
        "ttl_s": ttl,
        "idempotency_key": key,
        "tenant": tenant,
    }
    params: Any = {name: value for name, value in given.items() if value is not None} | named_params(param or ())
    model, bare = model or default_model(), None if chat else text
    _check(bare, model, messages, params)
    with connected(url) as client:
        job = client.submit(bare, model=model, messages=messages, **params)
        if stream:
            _stream(client, job, timeout)
        elif wait:
            _finish(_wait(client, job.id, timeout), as_json)
        elif as_json:
            print_json(job.model_dump(mode="json", exclude_none=True))
        else:
            print(job.id)


def _check(prompt: str | None, model: str, messages: Any, params: Any) -> None:
    """Raise Failure for what no server would take: it isn't sent."""
    from headrace import BadRequest
    from headrace.params import new_request

    try:
        new_request(model, prompt, messages, params)
    except BadRequest as error:
        raise Failure(error.message, code=Exit.USAGE) from None


def _read(file: typer.FileText) -> str:
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise Failure(f"{file.name} is no UTF-8 text: {error.reason} at byte {error.start}", code=Exit.USAGE) from None


def _wait(client: Client, job_id: str, timeout: float | None) -> Job:
    from headrace import JobTimeout

    try:
        if not err.is_terminal:
            return client.wait(job_id, timeout)
        with err.status(f"job {job_id}"):
            return client.wait(job_id, timeout)
    except JobTimeout as error:
        raise Failure(_late(error, timeout), f"`{command()} status {job_id} --wait` goes on waiting") from None
    except KeyboardInterrupt:
        raise _left(job_id) from None


def _stream(client: Client, job: Job, timeout: float | None) -> None:
    from headrace import JobFailed, JobTimeout

    from cli.render import facts

    try:
        for piece in client.stream(job, timeout):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except JobFailed:
        pass
    except JobTimeout as error:
        raise Failure(_late(error, timeout), f"`{command()} watch {job.id}` goes on") from None
    except KeyboardInterrupt:
        raise _left(job.id) from None
    finally:
        print(flush=True)
    ended = client.get(job)
    err.print(facts(ended))
    _exit_by(ended)


def _late(error: JobTimeout, timeout_s: float | None) -> str:
    seen = f" (it is {error.job.status})" if error.job else ""
    return f"job {error.job_id} had not ended after {error.timeout_s if timeout_s is None else timeout_s:g} s{seen}"


def _left(job_id: str) -> Failure:
    return Failure(
        f"stopped waiting; job {job_id} goes on", f"`{command()} cancel {job_id}` stops it", Exit.INTERRUPTED
    )


def _finish(job: Job, as_json: bool) -> None:
    from cli.render import whole

    if as_json:
        print_json(job.model_dump(mode="json", exclude_none=True))
    else:
        out.print(whole(job), soft_wrap=True)
    _exit_by(job)


def _exit_by(job: Job) -> None:
    if job.status.terminal and job.status.value != "succeeded":
        raise typer.Exit(Exit.FAILED)


def status(
    job: JobId,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait for the end.")] = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="Most seconds to wait.")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Print a job: its status, its text, where its time went.

    Exit codes: 0 it is queued, running or succeeded; 1 it failed, was cancelled, expired, or doesn't exist.
    """
    with connected(url) as client:
        _finish(_wait(client, job, timeout) if wait else client.get(job), as_json)


def watch(
    job: JobId,
    timeout: Annotated[float | None, typer.Option(min=0, help="Most seconds to watch.")] = None,
    url: Url = None,
) -> None:
    """Print a job's text as it comes, from its beginning, then where its time went."""
    with connected(url) as client:
        _stream(client, client.get(job), timeout)


def cancel(
    jobs: JobIds,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until they have stopped.")] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Stop jobs, queued or running. A running one keeps the text that it has.

    Exit codes: 0 all of them, 1 some can't be stopped; the others are.
    """
    with connected(url) as client:
        stopped, missed = each(jobs, client.cancel)
        if wait:
            stopped = [_wait(client, job.id, None) for job in stopped]
        report(stopped, missed, as_json)


def retry(jobs: JobIds, as_json: Json = False, url: Url = None) -> None:
    """Enqueue jobs again that ended without success, dead letters included.

    Exit codes: 0 all of them, 1 some can't be enqueued; the others are.
    """
    with connected(url) as client:
        report(*each(jobs, client.retry), as_json)


def each(jobs: list[str], act: Callable[[str], Job]) -> tuple[list[Job], int]:
    """Do it to each job once: what became of them, and how many it couldn't be done to. Those keep no other from it."""
    from headrace import Conflict, NotFound

    done, missed = [], 0
    for job in dict.fromkeys(jobs):
        try:
            done.append(act(job))
        except (NotFound, Conflict) as error:
            told = error.message if job in error.message else f"{job}: {error.message}"
            err.print(told, soft_wrap=True, markup=False)
            missed += 1
    return done, missed


def report(jobs: list[Job], missed: int, as_json: bool) -> None:
    """A line for each job, or one JSON document; exit code 1 if any was missed."""
    from cli.render import status_text

    if as_json:
        print_json([job.model_dump(mode="json", exclude_none=True) for job in jobs])
    else:
        for job in jobs:
            stopping = " (stopping)" if job.cancel_requested and not job.status.terminal else ""
            out.print(job.id, status_text(job), stopping)
    if missed:
        raise typer.Exit(Exit.FAILED)


def list_jobs(
    status: Annotated[
        Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"] | None,
        typer.Option(help="Only these."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only this model's.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most jobs to print.")] = 20,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List jobs, newest first."""
    from itertools import islice

    with connected(url) as client:
        found = client.jobs(status=status, model=model, tenant=tenant, page_size=min(limit, 100))
        jobs = list(islice(found, limit))
    if as_json:
        print_json([job.model_dump(mode="json", exclude_none=True) for job in jobs])
        return
    from headrace.contract import utc_now

    from cli.render import listing

    out.print(listing(jobs, utc_now(), out.width) if jobs else "no jobs", soft_wrap=True)
