"""Dead letters over HTTP and on the command line: listed, shown with what became of them, replayed, purged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from headrace import Client, NotFound
from headrace.contract import JobStatus
from typer.testing import CliRunner

from cli.main import app
from ledger import Ledger
from ledger.contract import Claim
from tests.integration.api.conftest import ApiServer, HandWorker

runner = CliRunner()


def kill(ledger: Ledger, *job_ids: str, owner: str) -> None:
    """A worker claims the jobs and dies at once."""
    ledger.claim([Claim(job_id) for job_id in job_ids], owner, lease_s=-1)
    ledger.reap()  # or the server's relay was first
    assert all(job is not None and job.status is JobStatus.FAILED for job in map(ledger.get, job_ids))


@pytest.fixture
def ledger(worker: HandWorker) -> Ledger:
    return worker.ledger


@pytest.fixture
def client(server: ApiServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


@pytest.fixture
def letters(client: Client, ledger: Ledger) -> list[str]:
    """Two dead letters of two tenants, the newest first; a job that failed in another way is none of them."""
    jobs = [
        client.submit("hello", model="bytes", max_tokens=4, max_attempts=1, tenant=tenant).id for tenant in ("a", "b")
    ]
    kill(ledger, *jobs, owner="w1")
    return jobs[::-1]


def run(server: ApiServer, *arguments: str, **options: Any) -> Any:
    return runner.invoke(app, ["dlq", *arguments, "--url", server.url], **options)


def test_are_listed_newest_first_and_by_tenant_and_age(client: Client, letters: list[str]) -> None:
    assert [job.id for job in client.dead_letters()] == letters
    assert [job.id for job in client.dead_letters(tenant="a")] == letters[1:]
    assert list(client.dead_letters(model="other")) == []
    assert list(client.dead_letters(older_than_s=3600)) == []
    assert [job.id for job in client.dead_letters(page_size=1)] == letters


def test_are_shown_with_the_attempts_that_they_lost(client: Client, letters: list[str]) -> None:
    letter = client.dead_letter(letters[0])
    assert (letter.status, letter.attempt) == (JobStatus.FAILED, 1)
    told = [(lost.attempt, lost.worker, lost.companions) for lost in letter.lost_attempts]
    assert told == [(1, "w1", 1)]


def test_are_replayed_with_their_attempts_reset_and_their_history_kept(
    client: Client, letters: list[str], ledger: Ledger
) -> None:
    job = client.replay(letters[0])
    assert (job.status, job.attempt) == (JobStatus.QUEUED, 0)
    assert [job.id for job in client.dead_letters()] == letters[1:]
    with pytest.raises(NotFound):
        client.replay(letters[0])
    kill(ledger, letters[0], owner="w2")
    assert [lost.worker for lost in client.dead_letter(letters[0]).lost_attempts] == ["w1", "w2"]


def test_are_purged_for_good(client: Client, letters: list[str]) -> None:
    assert client.purge(letters[0]).id == letters[0]
    for gone in (client.get, client.purge, client.dead_letter):
        with pytest.raises(NotFound):
            gone(letters[0])
    assert [job.id for job in client.dead_letters()] == letters[1:]


def test_no_other_job_is_a_dead_letter(client: Client, server: ApiServer) -> None:
    job = client.submit("hello", model="bytes", max_tokens=4)
    for door in (client.dead_letter, client.replay, client.purge):
        with pytest.raises(NotFound, match=f"job '{job.id}' is no dead letter: it is queued") as refused:
            door(job.id)
        assert refused.value.code == "not_a_dead_letter"
    assert "is no dead letter: it is queued" in run(server, "show", job.id).stderr
    assert client.get(job).status is JobStatus.QUEUED
    client.cancel(job)
    assert "is no dead letter: it is cancelled\n" in run(server, "show", job.id).stderr
    assert httpx.get(f"{server.url}/v1/dead-letters?older_than_s=-1").status_code == 400


def test_the_command_line_lists_shows_replays_and_purges(server: ApiServer, letters: list[str], client: Client) -> None:
    listed = run(server, "list", "--json")
    assert [job["id"] for job in json.loads(listed.stdout)] == letters
    shown = run(server, "list")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["Job", *letters]
    assert not shown.stderr
    first = run(server, "list", "--limit", "1")
    assert letters[1] not in first.stdout
    assert "there are more: --limit N" in first.stderr
    told = run(server, "show", letters[0]).stdout
    assert "attempt 1 lost" in told
    assert told.rstrip().endswith("on w1 with one other job")
    assert run(server, "replay").exit_code == 2, "all of them only if asked for"
    assert run(server, "replay", letters[0], "--tenant", "a").exit_code == 2
    assert run(server, "replay", "--all", "--tenant", "a").exit_code == 0
    assert [job.id for job in client.dead_letters()] == letters[:1]
    assert run(server, "purge", "--all", input="n\n").exit_code == 1
    assert [job.id for job in client.dead_letters()] == letters[:1]
    assert run(server, "purge", "--all", "--yes").exit_code == 0
    assert run(server, "list").stdout == "no dead letters\n"
    assert run(server, "purge", letters[0], "--yes").exit_code == 1
    for action in ("replay", "purge"):
        nothing = run(server, action, "--all")
        assert (nothing.exit_code, nothing.stdout) == (0, "no dead letters\n")


def test_one_that_is_not_there_keeps_no_other_from_its_replay(
    server: ApiServer, letters: list[str], client: Client
) -> None:
    done = run(server, "replay", letters[0], "nope", letters[1])
    assert done.exit_code == 1
    assert "there is no job 'nope'" in done.stderr
    assert all(client.get(letter).status is JobStatus.QUEUED for letter in letters)


def test_only_those_that_are_there_are_asked_about(server: ApiServer, letters: list[str], client: Client) -> None:
    nobody = run(server, "purge", "nope")
    assert (nobody.exit_code, nobody.stdout, nobody.stderr) == (1, "", "there is no job 'nope'\n")
    one = run(server, "purge", "nope", letters[0], letters[0], input="y\n")
    assert one.exit_code == 1
    assert one.stderr.startswith("there is no job 'nope'\ndelete 1 dead letter for good? [y/N]:")
    assert [job.id for job in client.dead_letters()] == letters[1:]
