from __future__ import annotations

import asyncio
import threading
import time

import pytest

from api import threads
from api.threads import LedgerThreads
from ledger.contract import LedgerUnavailable


class Database:
    """Counts calls, and is away as long as it is told to be."""

    def __init__(self) -> None:
        self.away = True
        self.calls = 0
        self.gate = threading.Event()

    def call(self) -> int:
        self.calls += 1
        self.gate.wait(5)
        if self.away:
            raise LedgerUnavailable("refused")
        return self.calls


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "TRY_EVERY_S", 0.05)


async def test_while_the_database_is_away_one_call_tries_and_the_others_fail_at_once() -> None:
    pool, database = LedgerThreads(), Database()
    database.gate.set()
    with pytest.raises(LedgerUnavailable):
        await pool.call(database.call)
    with pytest.raises(LedgerUnavailable):
        await pool.call(database.call)
    assert database.calls == 1

    await asyncio.sleep(0.06)
    database.gate.clear()
    trial = asyncio.create_task(pool.call(database.call))
    await asyncio.sleep(0)
    began_s = time.monotonic()
    for _ in range(20):
        with pytest.raises(LedgerUnavailable):
            await pool.call(database.call)
    assert time.monotonic() - began_s < 1
    database.away = False
    database.gate.set()
    assert await trial == 2


async def test_calls_that_wait_for_a_thread_fail_once_the_database_is_away() -> None:
    pool, database = LedgerThreads(threads=1), Database()
    calls = [asyncio.create_task(pool.call(database.call)) for _ in range(5)]
    await asyncio.sleep(0.02)
    database.gate.set()
    assert {type(error) for error in await asyncio.gather(*calls, return_exceptions=True)} == {LedgerUnavailable}
    assert database.calls == 1


async def test_after_a_good_call_all_go_through_again() -> None:
    pool, database = LedgerThreads(), Database()
    database.gate.set()
    with pytest.raises(LedgerUnavailable):
        await pool.call(database.call)
    await asyncio.sleep(0.06)
    database.away = False
    await pool.call(database.call)
    assert sorted(await asyncio.gather(*(pool.call(database.call) for _ in range(5)))) == [3, 4, 5, 6, 7]


async def test_another_error_is_no_outage() -> None:
    pool = LedgerThreads()
    with pytest.raises(ZeroDivisionError):
        await pool.call(lambda: 1 // 0)
    assert await pool.call(lambda: 1) == 1
