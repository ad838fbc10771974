"""How deliveries become leases. A batch of claims is a handful of statements, however large it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from headrace.contract import JobRequest, Reason, id_age_s
from pydantic import ValidationError
from sqlalchemy import Row, delete, select
from sqlalchemy.engine import Connection

from ledger.bulk import one_of
from ledger.clock import db_now
from ledger.contract import Claim, ClaimResult, Lease, Verdict
from ledger.door import new_row, with_seed
from ledger.losses import clear_companions, lose, must_be_alone
from ledger.models import MAX_ID_CHARS, JobRow, RevocationRow
from ledger.rows import drop_publications, end, insert_jobs, lock_jobs
from ledger.states import CANCELLED, EXPIRED, FAILED, LIVE, QUEUED, RUNNING, move

_COLUMNS = (
    JobRow.status,
    JobRow.attempt,
    JobRow.max_attempts,
    JobRow.fence,
    JobRow.cancel_requested,
    JobRow.worker,
    JobRow.lease_until,
    JobRow.accepted_at,
    JobRow.deadline,
    JobRow.traceparent,
    JobRow.request,
)

ENDS = {
    Verdict.CANCELLED: (CANCELLED, Reason.CANCELLED),
    Verdict.EXPIRED: (EXPIRED, Reason.DEADLINE_EXCEEDED),
    Verdict.DEAD: (FAILED, Reason.DEAD_LETTER),
}
"""Verdicts that end a job nobody works on."""


def verdict_on(row: Row[Any]) -> Verdict:
    """What is to become of a locked job that somebody wants to run, or that the reaper found."""
    if row.status.terminal:
        return Verdict.TERMINAL
    if row.status is RUNNING and row.lease_until > row.now:
        return Verdict.DUPLICATE
    if row.cancel_requested:
        return Verdict.CANCELLED
    if row.deadline is not None and row.deadline <= row.now:
        return Verdict.EXPIRED
    if row.attempt >= row.max_attempts:
        return Verdict.DEAD
    return Verdict.RUN


def claim(
    connection: Connection, claims: Sequence[Claim], owner: str, lease_s: float, granted: dict[str, int]
) -> list[ClaimResult]:
    """`granted` (job to fence) outlives one try of a batch: a lease whose commit went through unanswered is found."""
    rows = lock_jobs(connection, (delivery.job_id for delivery in claims), *_COLUMNS)
    absent = {c.job_id: c for c in claims if c.request is not None and _new_id(c.job_id, rows)}
    fresh = _write_raw(connection, absent, owner, lease_s) if absent else {}
    granted |= dict.fromkeys(fresh, 1)
    if absent.keys() - fresh.keys():
        rows |= lock_jobs(connection, absent.keys() - fresh.keys(), *_COLUMNS)
    results: list[ClaimResult] = []
    started: list[str] = []
    ended: dict[Verdict, list[str]] = defaultdict(list)
    seen: set[str] = set()
    lapsed: list[str] = []
    for delivery in claims:
        if delivery.job_id in seen:
            results.append(ClaimResult(delivery.job_id, _repeated(results, delivery.job_id)))
            continue
        seen.add(delivery.job_id)
        if delivery.job_id in fresh:
            results.append(fresh[delivery.job_id])
            continue
        row = rows.get(delivery.job_id)
        if row is None:
            results.append(ClaimResult(delivery.job_id, Verdict.UNKNOWN))
            continue
        verdict = verdict_on(row)
        if verdict is Verdict.RUN and must_be_alone(row) and not delivery.alone:
            results.append(ClaimResult(row.id, Verdict.ALONE))
            continue
        if row.status is RUNNING and verdict not in (Verdict.DUPLICATE, Verdict.TERMINAL):
            lapsed.append(row.id)
        if verdict is Verdict.DUPLICATE and row.worker == owner and granted.get(row.id) == row.fence:
            results.append(_run(row, owner, row.fence, row.attempt))
        elif verdict is Verdict.RUN:
            try:
                results.append(_run(row, owner, row.fence + 1, row.attempt + 1))
            except ValidationError as error:
                end(connection, [row.id], FAILED, Reason.INVALID_REQUEST, f"the stored request is not valid: {error}")
                results.append(ClaimResult(row.id, Verdict.TERMINAL))
                continue
            started.append(row.id)
            granted[row.id] = row.fence + 1
        else:
            results.append(ClaimResult(row.id, verdict))
            ended[verdict].append(row.id)
    lose(connection, lapsed)
    if started:
        start = move(LIVE, RUNNING).where(JobRow.id.in_(started))
        connection.execute(
            start.values(attempt=JobRow.attempt + 1, fence=JobRow.fence + 1, worker=owner, lease_until=db_now(lease_s))
        )
        drop_publications(connection, started)
    for verdict, (status, reason) in ENDS.items():
        end(connection, ended[verdict], status, reason)
    if ended[Verdict.DEAD]:
        clear_companions(connection, ended[Verdict.DEAD])
    return results


def _new_id(job_id: str, known: Mapping[str, Any]) -> bool:
    return job_id not in known and 0 < len(job_id) <= MAX_ID_CHARS and "\0" not in job_id


def _run(row: Row[Any], owner: str, fence: int, attempt: int) -> ClaimResult:
    return ClaimResult(
        row.id,
        Verdict.RUN,
        lease=Lease(row.id, owner, fence, attempt),
        request=JobRequest.model_validate((row.request or {}) | {"traceparent": row.traceparent}),
        queued_s=(row.now - row.accepted_at).total_seconds(),
        remaining_s=(row.deadline - row.now).total_seconds() if row.deadline is not None else None,
    )


def _repeated(results: Sequence[ClaimResult], job_id: str) -> Verdict:
    """The verdict on a second delivery of a job in one batch."""
    first = next(result for result in results if result.job_id == job_id)
    if first.verdict is Verdict.UNKNOWN:
        return Verdict.UNKNOWN
    held = first.verdict in (Verdict.RUN, Verdict.DUPLICATE, Verdict.ALONE)
    return Verdict.DUPLICATE if held else Verdict.TERMINAL


def _write_raw(
    connection: Connection, claims: Mapping[str, Claim], owner: str, lease_s: float
) -> dict[str, ClaimResult]:
    """Write the rows of raw messages under their own ids. Those that may run are written as running.

    One whose idempotency key names another job becomes a failed job that says so: its producer waits for this id,
    and the work is done once all the same.
    """
    now = connection.execute(_NOW).scalar_one()
    requests = {i: with_seed(claim.request) for i, claim in sorted(claims.items()) if claim.request is not None}
    heard = set(connection.execute(_HEARD, {"ids": list(requests)}).scalars())
    new = {}
    for job_id, seeded in requests.items():
        asked = claims[job_id].request or seeded
        row = new_row(job_id, asked, seeded, now - timedelta(seconds=id_age_s(job_id, now.timestamp())))
        runs = job_id not in heard and (row["deadline"] is None or row["deadline"] > now)
        new[job_id] = row | {
            "cancel_requested": job_id in heard,
            "status": RUNNING if runs else QUEUED,
            "attempt": int(runs),
            "fence": int(runs),
            "worker": owner if runs else None,
            "started_at": now if runs else None,
            "lease_until": now + timedelta(seconds=lease_s) if runs else None,
        }
    written = insert_jobs(connection, list(new.values()))
    if unwritten := new.keys() - written:
        for job_id in sorted(unwritten - _existing(connection, unwritten)):
            insert_jobs(connection, [_doubled(connection, new[job_id], now)])
    return {i: _fresh(new[i], requests[i], now) for i in written if new[i]["status"] is RUNNING}


_NOW = select(db_now())
_HEARD = delete(RevocationRow).where(one_of(RevocationRow.job_id)).returning(RevocationRow.job_id)


def _fresh(row: Mapping[str, Any], request: JobRequest, now: datetime) -> ClaimResult:
    deadline = row["deadline"]
    return ClaimResult(
        row["id"],
        Verdict.RUN,
        lease=Lease(row["id"], row["worker"], row["fence"], row["attempt"]),
        request=request,
        queued_s=(now - row["accepted_at"]).total_seconds(),
        remaining_s=(deadline - now).total_seconds() if deadline is not None else None,
    )


def _doubled(connection: Connection, row: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """The row of a job whose idempotency key is another's."""
    keyed = select(JobRow.id).where(JobRow.tenant == row["tenant"], JobRow.idempotency_key == row["idempotency_key"])
    holder = connection.execute(keyed).scalar_one()
    return {
        **row,
        "idempotency_key": None,
        "status": FAILED,
        "attempt": 0,
        "worker": None,
        "started_at": None,
        "lease_until": None,
        "finished_at": now,
        "error_code": Reason.INVALID_REQUEST,
        "error_message": f"its idempotency key was used before, by job {holder}: read the result there",
    }


def _existing(connection: Connection, ids: Iterable[str]) -> set[str]:
    return set(connection.execute(select(JobRow.id).where(JobRow.id.in_(list(ids)))).scalars())
