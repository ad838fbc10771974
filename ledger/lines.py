"""Whose turn it is to have a message sent.

The broker serves each class of a model strictly in the order in which messages came, so only a bounded window of jobs
is given to it. The others wait here, in one line for each model, class of priority and tenant; and a place that comes
free in a window goes to the tenant whose jobs hold the fewest of its tokens, measured against its weight. So a tenant
that enqueues thousands of jobs keeps nobody else waiting for longer than a window takes.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.contract import Priority
from sqlalchemy import Select, bindparam, case, func, literal, select, update
from sqlalchemy.engine import Connection

from ledger.clock import db_now, seconds
from ledger.contract import Windows
from ledger.models import JobRow, OutboxRow

_CLASSES = {Priority.HIGH: "0", Priority.NORMAL: "1", Priority.LOW: "2"}
_PRIORITIES = {digit: priority for priority, digit in _CLASSES.items()}
_AHEAD = 32
"""Jobs of one tenant that are looked at for one window."""
_RAISED_SHARE = 16
"""One in so many places of a model's windows may be held by a job that was raised."""

LINE = (
    JobRow.model
    + case({priority: f" {digit} " for priority, digit in _CLASSES.items()}, value=JobRow.priority)
    + JobRow.tenant
)
"""The line of a job. Names have no spaces in them."""
_FIRST = JobRow.model + f" {_CLASSES[Priority.HIGH]} " + JobRow.tenant


class Line(NamedTuple):
    """One tenant's jobs of one class, for one model."""

    model: str
    priority: Priority
    tenant: str

    @classmethod
    def parse(cls, text: str) -> Line:
        model, digit, tenant = text.split(" ")
        return cls(model, _PRIORITIES[digit], tenant)

    def __str__(self) -> str:
        return f"{self.model} {_CLASSES[self.priority]} {self.tenant}"


_IN_NO_LINE = (
    select(OutboxRow.id)
    .where(OutboxRow.sent_at.is_(None), OutboxRow.due_at <= db_now(), OutboxRow.line.is_(None))
    .order_by(OutboxRow.due_at, OutboxRow.id)
    .limit(bindparam("most"))
)
"""Relays ask all the time. What they ask is put together once: that takes longer than the answer."""


def turns(connection: Connection, limit: int, windows: Windows) -> list[int]:
    """Outbox rows to be sent now, in order: at first what belongs to no line."""
    found = list(connection.execute(_IN_NO_LINE, {"most": limit}).scalars())
    waiting: dict[tuple[str, Priority], list[Line]] = defaultdict(list)
    for line in map(Line.parse, connection.execute(_UNSENT_LINES).scalars()):
        waiting[line.model, line.priority].append(line)
    if not waiting or len(found) >= limit:
        return found
    held = _held(connection)
    for (model, priority), lines in sorted(waiting.items(), key=lambda item: _CLASSES[item[0][1]]):
        inside = sum(jobs for line, (jobs, _) in held.items() if (line.model, line.priority) == (model, priority))
        room = min(windows.jobs - inside, limit - len(found))
        if room > 0:
            found += _fair(connection, lines, {line: held.get(line, (0, 0))[1] for line in lines}, room, windows)
    return found


def _steps() -> Select[Any]:
    """The lines with somebody in them, each found by one step in the index."""
    unsent = select(func.min(OutboxRow.line)).where(OutboxRow.sent_at.is_(None))
    steps = unsent.cte("steps", recursive=True)
    name = steps.c[0]
    following = unsent.where(OutboxRow.line > name).correlate(steps).scalar_subquery()
    steps = steps.union_all(select(following).where(name.is_not(None)))
    return select(steps.c[0]).where(steps.c[0].is_not(None))


_UNSENT_LINES = _steps()


def _held(connection: Connection) -> dict[Line, tuple[int, int]]:
    """Jobs and tokens that the broker has been given and no worker has claimed, by line."""
    sent = (
        select(OutboxRow.line, func.count(), func.sum(JobRow.tokens))
        .join(JobRow, JobRow.id == OutboxRow.job_id)
        .where(OutboxRow.sent_at.is_not(None))
        .group_by(OutboxRow.line)
    )
    return {Line.parse(line): (jobs, int(tokens or 0)) for line, jobs, tokens in connection.execute(sent) if line}


def _fair(
    connection: Connection, lines: Sequence[Line], held_tokens: Mapping[Line, int], room: int, windows: Windows
) -> list[int]:
    """At most `room` rows of one window. Of tenants that hold equally much, the one that waits longest is first."""

    def load(line: Line, tokens: int) -> float:
        return tokens / windows.weights.get(line.tenant, 1.0)

    least = heapq.nsmallest(room, lines, key=lambda line: load(line, held_tokens[line]))
    heads = []
    for line in least:
        rows = iter(_front(connection, line, min(room, _AHEAD)))
        if (first := next(rows, None)) is not None:
            heads.append((load(line, held_tokens[line]), first, held_tokens[line], line, rows))
    heapq.heapify(heads)
    chosen: list[int] = []
    while heads and len(chosen) < room:
        _, row, tokens, line, rows = heads[0]
        chosen.append(row.id)
        tokens += row.tokens
        if (following := next(rows, None)) is None:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (load(line, tokens), following, tokens, line, rows))
    return chosen


class _Waiting(NamedTuple):
    due: str
    id: int
    tokens: int


def _front(connection: Connection, line: Line, limit: int) -> list[_Waiting]:
    rows = connection.execute(
        select(OutboxRow.id, OutboxRow.due_at, JobRow.tokens)
        .join(JobRow, JobRow.id == OutboxRow.job_id)
        .where(OutboxRow.sent_at.is_(None), OutboxRow.line == str(line), OutboxRow.due_at <= db_now())
        .order_by(OutboxRow.due_at, OutboxRow.id)
        .limit(limit)
    )
    return [_Waiting(row.due_at.isoformat(), row.id, max(1, row.tokens or 0)) for row in rows]


_AGED = (
    select(OutboxRow.id, JobRow.model)
    .join(JobRow, JobRow.id == OutboxRow.job_id)
    .where(OutboxRow.sent_at.is_not(None), ~OutboxRow.raised, OutboxRow.sent_at <= db_now(seconds("since_s")))
    .where(JobRow.priority != Priority.HIGH)
    .order_by(OutboxRow.sent_at, OutboxRow.id)
)


def raise_aged(connection: Connection, aging_s: float, windows: Windows) -> int:
    """Let jobs that the broker has held for too long be sent again, in the first class. Returns how many.

    A few at a time, so that they share with that class and don't take its place.
    """
    aged = connection.execute(_AGED, {"since_s": -aging_s}).all()
    if not aged:
        return 0
    places = max(1, windows.jobs // _RAISED_SHARE)
    raised = select(JobRow.model, func.count()).join(OutboxRow, JobRow.id == OutboxRow.job_id).where(OutboxRow.raised)
    room = defaultdict(lambda: places)
    for model, count in connection.execute(raised.group_by(JobRow.model)):
        room[model] = places - count
    chosen = []
    for row in aged:
        if room[row.model] > 0:
            room[row.model] -= 1
            chosen.append(row.id)
    if chosen:
        first = select(_FIRST).where(JobRow.id == OutboxRow.job_id).scalar_subquery()
        again = update(OutboxRow).where(OutboxRow.id.in_(chosen), OutboxRow.sent_at.is_not(None))
        connection.execute(again.values(line=first, raised=literal(True), due_at=OutboxRow.sent_at, sent_at=None))
    return len(chosen)
