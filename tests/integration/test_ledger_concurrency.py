"""Many threads and processes on one ledger: one of them wins, and the ledger is whole."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from headrace.contract import Job, JobRequest, JobResult, JobStatus

from ledger import Ledger
from ledger.contract import Claim, IdempotencyConflict, Lease, Outcome, Verdict

THREADS = 8
PROCESSES = 3


def together(work: Callable[[int], Any]) -> list[Any]:
    """Run `work(0..THREADS-1)`, all let go at the same moment."""
    gate = threading.Barrier(THREADS)

    def run(number: int) -> Any:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def submit(ledger: Ledger, **fields: Any) -> str:
    return ledger.submit(JobRequest(**{"model": "m", "prompt": "x"} | fields)).job.id


def success(lease: Lease) -> Outcome:
    return Outcome(lease, JobStatus.SUCCEEDED, JobResult(text=lease.owner))


def test_one_of_many_claimers_runs_a_job(ledger: Ledger) -> None:
    for _ in range(5):
        job_id = submit(ledger)
        results = together(lambda n, job_id=job_id: ledger.claim([Claim(job_id)], f"w{n}", 30)[0])
        assert Counter(r.verdict for r in results) == {Verdict.RUN: 1, Verdict.DUPLICATE: THREADS - 1}


def test_overlapping_batches_share_the_jobs_out(ledger: Ledger) -> None:
    """Each claimer takes all jobs in an order of its own; no deadlock, and each job goes to one of them."""
    ids = [submit(ledger) for _ in range(20)]

    def claim(number: int) -> list[str]:
        order = ids[number:] + ids[:number]
        results = ledger.claim([Claim(i) for i in (order if number % 2 else reversed(order))], f"w{number}", 30)
        return [r.job_id for r in results if r.verdict is Verdict.RUN]

    won = together(claim)
    assert sorted(i for jobs in won for i in jobs) == sorted(ids)


def test_a_raw_message_delivered_to_many_runs_once(ledger: Ledger) -> None:
    request = JobRequest(model="m", prompt="x", idempotency_key="k")
    results = together(lambda n: ledger.claim([Claim("raw", request)], f"w{n}", 30)[0].verdict)
    assert Counter(results) == {Verdict.RUN: 1, Verdict.DUPLICATE: THREADS - 1}


def test_raw_messages_with_one_key_run_once(ledger: Ledger) -> None:
    request = JobRequest(model="m", prompt="x", idempotency_key="k")
    results = together(lambda n: ledger.claim([Claim(f"raw-{n}", request)], f"w{n}", 30)[0].verdict)
    assert Counter(results) == {Verdict.RUN: 1, Verdict.TERMINAL: THREADS - 1}


def test_one_key_makes_one_job(ledger: Ledger) -> None:
    request = JobRequest(model="m", prompt="x", idempotency_key="k")
    submissions = together(lambda _: ledger.submit(request))
    assert len({s.job.id for s in submissions}) == 1
    assert sum(s.created for s in submissions) == 1
    assert len(ledger.outbox(100)) == 1


def test_one_key_with_many_bodies_makes_one_job_and_conflicts(ledger: Ledger) -> None:
    def work(number: int) -> Job | None:
        try:
            return ledger.submit(JobRequest(model="m", prompt=str(number), idempotency_key="k")).job
        except IdempotencyConflict:
            return None

    assert sum(job is not None for job in together(work)) == 1


def test_one_of_two_holders_commits(ledger: Ledger) -> None:
    """A lease expires while its holder commits: either the old one's outcome stands or the new one's, never both."""
    for _ in range(10):
        job_id = submit(ledger)
        [old] = ledger.claim([Claim(job_id)], "old", -1)

        def work(number: int, job_id: str = job_id, old: Any = old) -> bool:
            if number % 2:
                return ledger.commit([success(old.lease)])[0]
            [new] = ledger.claim([Claim(job_id)], f"new{number}", 30)
            return new.verdict is Verdict.RUN and ledger.commit([success(new.lease)])[0]

        answers = together(work)
        text = ledger.get(job_id).result.text
        assert any(answers[0::2]) != any(answers[1::2])
        assert (text == "old") == any(answers[1::2])


def test_cancel_claim_release_and_reap_at_once_leave_the_ledger_whole(ledger: Ledger) -> None:
    ids = [submit(ledger, max_attempts=3) for _ in range(12)]
    duties: list[Callable[[], object]] = [
        lambda: ledger.request_cancel(ids[:4]),
        lambda: ledger.release([r.lease for r in ledger.claim([Claim(i) for i in ids], "w1", -1) if r.lease]),
        lambda: ledger.commit([success(r.lease) for r in ledger.claim([Claim(i) for i in ids], "w2", -1) if r.lease]),
        lambda: ledger.reap(),
        lambda: ledger.sent([row.id for row in ledger.outbox(10)]),
        lambda: ledger.republish(ids),
        lambda: ledger.renew([r.lease for r in ledger.claim([Claim(i) for i in ids], "w3", -1) if r.lease], -1),
        lambda: ledger.counts(),
    ]
    for _ in range(3):
        together(lambda n: duties[n]())
        ledger.check()


CLAIMER = """
import sys
from ledger import Ledger
from ledger.contract import Claim, Verdict
url, owner, *ids = sys.argv[1:]
ledger = Ledger(url)
ledger.now()
sys.stdin.readline()
for job_id in ids:
    if ledger.claim([Claim(job_id)], owner, 30)[0].verdict is Verdict.RUN:
        print(job_id)
ledger.close()
"""


@pytest.mark.slow
def test_processes_share_jobs_out(ledger: Ledger, migrated_url: str) -> None:
    ids = [submit(ledger) for _ in range(30)]
    claimers = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMER, migrated_url, f"w{n}", *ids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(PROCESSES)
    ]
    for claimer in claimers:
        claimer.stdin.write("go\n")
        claimer.stdin.flush()
    won = [claimer.communicate(timeout=60)[0].split() for claimer in claimers]
    assert [claimer.returncode for claimer in claimers] == [0] * PROCESSES
    assert sorted(i for jobs in won for i in jobs) == sorted(ids)


WORKER = """
import sys
from headrace.contract import JobRequest, JobResult, JobStatus
from ledger import Ledger
from ledger.contract import Claim, Outcome
ledger = Ledger(sys.argv[1])
while True:
    ids = [ledger.submit(JobRequest(model="m", prompt="x")).job.id for _ in range(4)]
    leases = [result.lease for result in ledger.claim([Claim(i) for i in ids], "w", 0.5)]
    done = leases[:3]
    answers = ledger.commit([Outcome(l, JobStatus.SUCCEEDED, JobResult(text=l.job_id)) for l in done])
    assert all(answers)
    print(*(l.job_id for l in done), flush=True)
"""


@pytest.mark.slow
def test_what_was_committed_survives_a_kill_and_what_was_not_comes_back(ledger: Ledger, migrated_url: str) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, migrated_url], stdout=subprocess.PIPE, text=True)
    reported = [job_id for _ in range(10) for job_id in worker.stdout.readline().split()]
    worker.kill()
    rest = worker.communicate(timeout=10)[0]
    reported += [job_id for line in rest.splitlines(keepends=True) if line.endswith("\n") for job_id in line.split()]
    ledger.check()
    assert len(reported) >= 30
    for job_id in reported:
        job = ledger.get(job_id)
        assert (job.status, job.result.text) == (JobStatus.SUCCEEDED, job_id)
    threading.Event().wait(0.6)
    assert ledger.reap() >= 10
    statuses = ledger.counts()["m"]
    assert statuses.get(JobStatus.RUNNING, 0) == 0
    assert statuses[JobStatus.QUEUED] >= 10
