"""The life of one job as a small model: ledger, broker and two workers, each step one that may be the last before a
fault. `explore` visits every state that any order of steps can reach.

A guard that is named in `without` is left out, so that tests can show what it is for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

GUARDS = (
    "the fence at commit",
    "the commit before the acknowledgement",
    "the reaper",
    "the reconciler",
    "the cancellation at the claim",
    "the cancellation at the reaper",
    "the count of attempts",
)
MAX_ATTEMPTS = 2
MOST_MESSAGES = 2
ENDED = ("succeeded", "cancelled", "dead")


class Worker(NamedTuple):
    """`idle`, `holding` a message, `running`, with all `done`, or `settled`: what is left is to acknowledge."""

    state: str = "idle"
    fence: int = 0


class World(NamedTuple):
    """All that the model knows."""

    status: str = "queued"
    attempt: int = 0
    fence: int = 0
    lease: bool = False
    """Whether it is live; the work's lease, while `running`."""
    cancel: bool = False
    outbox: bool = True
    messages: int = 0
    unacked: int = 0
    """Messages of workers that died."""
    workers: tuple[Worker, ...] = (Worker(), Worker())
    results: int = 0
    faults: int = 2
    """How many more there may be: deaths, wipes, lost messages, hand-backs."""
    asked: bool = False
    """Whether somebody has asked for its cancellation."""
    wrong: str = ""
    """The first promise that a step broke."""


Step = tuple[str, World]


def steps(world: World, without: frozenset[str] = frozenset(), faulty: bool = True) -> Iterator[Step]:
    """Every step that may come next; without the faults, those that must come at last."""
    yield from _ledger(world, without)
    for index, worker in enumerate(world.workers):
        for name, after in _worker(world, index, worker, without):
            yield f"worker {index}: {name}", after
    if faulty:
        yield from _faults(world)


def _ledger(world: World, without: frozenset[str]) -> Iterator[Step]:
    """Relay, reaper, reconciler, the visibility timeout, and the clock that ends leases of those who don't renew."""
    if world.outbox and world.messages < MOST_MESSAGES:
        yield "the relay publishes", world._replace(outbox=False, messages=world.messages + 1)
    held = any(worker.state in ("running", "done") and worker.fence == world.fence for worker in world.workers)
    if world.status == "running" and world.lease and not held:
        yield "the lease runs out", world._replace(lease=False)
    if world.status == "running" and not world.lease and "the reaper" not in without:
        yield "the reaper", _unheld(world, without, "the cancellation at the reaper")
    if world.unacked and world.messages < MOST_MESSAGES:
        yield "a message is handed out again", world._replace(unacked=world.unacked - 1, messages=world.messages + 1)
    lost = not world.messages and not world.unacked and all(worker.state != "holding" for worker in world.workers)
    if world.status == "queued" and not world.outbox and lost and "the reconciler" not in without:
        yield "the reconciler", world._replace(outbox=True)


def _unheld(world: World, without: frozenset[str], guard: str) -> World:
    """What the reaper makes of a job whose lease ran out."""
    if world.cancel and guard not in without:
        return _ended(world, "cancelled")
    if world.attempt >= MAX_ATTEMPTS:
        return _ended(world, "dead")
    return world._replace(status="queued", fence=world.fence + 1, outbox=True)


def _ended(world: World, status: str) -> World:
    return world._replace(status=status, fence=world.fence + 1, lease=False, outbox=False)


def _worker(world: World, index: int, worker: Worker, without: frozenset[str]) -> Iterator[Step]:
    match worker.state:
        case "idle":
            if world.messages:
                yield "takes a message", _put(world._replace(messages=world.messages - 1), index, Worker("holding"))
        case "holding":
            yield "claims", _claimed(world, index, without)
        case "running":
            lost = world.status != "running" or world.fence != worker.fence
            if lost:
                yield "learns that it lost its lease", _put(world, index, Worker("settled", worker.fence))
            else:
                yield "comes to its end", _put(world, index, Worker("done", worker.fence))
                if not world.lease:
                    yield "renews late", world._replace(lease=True)
                if world.cancel:
                    ended = world._replace(status="cancelled", lease=False)
                    yield "commits a cancellation", _put(ended, index, Worker("settled", worker.fence))
        case "done":
            yield "commits", _committed(world, index, worker, without)
            if "the commit before the acknowledgement" in without:
                yield "acknowledges", _acknowledged(world, index, worker)
        case _:
            yield "acknowledges", _acknowledged(world, index, worker)


def _claimed(world: World, index: int, without: frozenset[str]) -> World:
    drop = _put(world, index, Worker("settled"))
    if world.status in ENDED or (world.status == "running" and world.lease):
        return drop
    if world.cancel and "the cancellation at the claim" not in without:
        return _ended(drop, "cancelled")
    if world.attempt >= MAX_ATTEMPTS:
        return _ended(drop, "dead")
    wrong = world.wrong or ("a cancelled job ran again" if world.cancel else "")
    count = 0 if "the count of attempts" in without else 1
    run = world._replace(
        status="running", attempt=world.attempt + count, fence=world.fence + 1, lease=True, outbox=False, wrong=wrong
    )
    return _put(run, index, Worker("running", run.fence))


def _committed(world: World, index: int, worker: Worker, without: frozenset[str]) -> World:
    fits = world.status == "running" and (world.fence == worker.fence or "the fence at commit" in without)
    settled = _put(world, index, Worker("settled", worker.fence))
    if not fits:
        return settled
    wrong = world.wrong or ("a lost lease committed" if world.fence != worker.fence else "")
    return settled._replace(status="succeeded", lease=False, results=world.results + 1, wrong=wrong)


def _acknowledged(world: World, index: int, worker: Worker) -> World:
    early = world.status == "running" and world.fence == worker.fence
    wrong = world.wrong or ("acknowledged before the commit" if early else "")
    return _put(world, index, Worker())._replace(wrong=wrong)


def _faults(world: World) -> Iterator[Step]:
    """What nobody wants, and the cancellation, which may come at any time."""
    if not world.asked and world.status not in ENDED:
        asked = world._replace(asked=True)
        yield (
            "somebody cancels",
            _ended(asked, "cancelled") if world.status == "queued" else asked._replace(cancel=True),
        )
    if world.status == "running" and world.lease:
        yield "the worker is paused past its lease", world._replace(lease=False)
    if not world.faults:
        return
    hurt = world._replace(faults=world.faults - 1)
    for index, worker in enumerate(world.workers):
        if worker.state != "idle":
            dead = _put(hurt, index, Worker())
            yield f"worker {index} dies", dead._replace(unacked=min(dead.unacked + 1, MOST_MESSAGES))
        if worker.state == "running" and world.status == "running" and worker.fence == world.fence:
            yield f"worker {index} hands back", _handed_back(hurt, index)
    if world.messages:
        yield "a message is lost as it is taken", hurt._replace(messages=world.messages - 1)
    if world.messages or world.unacked:
        yield "the broker is wiped", hurt._replace(messages=0, unacked=0)
    if world.outbox and world.messages < MOST_MESSAGES:
        yield "the relay dies after it published", hurt._replace(messages=world.messages + 1)


def _handed_back(world: World, index: int) -> World:
    back = _put(world, index, Worker())
    if world.cancel:
        return _ended(back, "cancelled")
    messages = min(world.messages + 1, MOST_MESSAGES)
    return back._replace(status="queued", attempt=world.attempt - 1, lease=False, outbox=True, messages=messages)


def _put(world: World, index: int, worker: Worker) -> World:
    workers = list(world.workers)
    workers[index] = worker
    return world._replace(workers=tuple(workers))


@dataclass(frozen=True)
class Counterexample:
    """A promise that is broken, and the shortest way there."""

    promise: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.promise, *(f"  {number}. {step}" for number, step in enumerate(self.trace, 1))])


def broken(world: World, fair: int) -> str:
    """The promise that a state breaks, or nothing; `fair` is the number of steps that it has without a fault."""
    if world.wrong:
        return world.wrong
    if world.results > 1 or (world.status == "succeeded") != (world.results == 1):
        return "not one result for one success"
    if world.status == "queued" and world.cancel:
        return "a cancellation was forgotten"
    if not 0 <= world.attempt <= MAX_ATTEMPTS:
        return "attempts out of bounds"
    if not fair and (world.status not in ENDED or world.unacked or world.messages or world.outbox):
        return "nothing happens any more, and the job or a message of it is left"
    return ""


def explore(without: frozenset[str] = frozenset(), start: World | None = None) -> tuple[int, Counterexample | None]:
    """Visit every reachable state, the nearest first: how many there are, and the first promise that is broken.

    A job that can go on for ever without an end is found too: from each state, steps without faults must be able to
    reach its end, and then (as each of them happens at last) they do.
    """
    start = start or World()
    came: dict[World, tuple[World, str] | None] = {start: None}
    before: dict[World, list[World]] = {}
    line = deque([start])
    while line:
        world = line.popleft()
        fair = list(steps(world, without, faulty=False))
        if promise := broken(world, len(fair)):
            return len(came), Counterexample(promise, _trace(came, world))
        for _, after in fair:
            before.setdefault(after, []).append(world)
        for name, after in steps(world, without):
            if after not in came:
                came[after] = (world, name)
                line.append(after)
    ends = {world for world in came if world.status in ENDED}
    saved = _all_before(ends, lambda world: before.get(world, []))
    for world in came:
        if world not in saved:
            return len(came), Counterexample("the job never ends", _trace(came, world))
    return len(came), None


def _all_before(ends: set[World], before: Callable[[World], list[World]]) -> set[World]:
    found, line = set(ends), deque(ends)
    while line:
        for world in before(line.popleft()):
            if world not in found:
                found.add(world)
                line.append(world)
    return found


def _trace(came: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    trace = []
    while (step := came[world]) is not None:
        world, name = step
        trace.append(name)
    return tuple(reversed(trace))
