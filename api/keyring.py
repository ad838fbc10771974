"""The API keys that are valid now, read from the ledger at most every few seconds, however many requests come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from api.threads import LedgerThreads
from ledger.contract import LedgerUnavailable
from ledger.credentials import ApiKey, key_id_of
from ledger.keys import Keys

FRESH_S = 2.0
"""A key that was revoked is refused after this long."""
PACE_S = 0.25
"""Least time between two readings: who comes with a key that isn't known waits for the next one."""
STALE_S = 60.0
"""While the database is away, the keys that were valid before are taken for so long."""


class Keyring:
    """All valid keys, held together: a flood of wrong ones costs the ledger no more than a few readings a second."""

    def __init__(self, keys: Keys, threads: LedgerThreads) -> None:
        self._ledger_keys = keys
        self._threads = threads
        self._valid: Mapping[str, ApiKey] = {}
        self._read_s = float("-inf")
        """When the keys at hand were asked for, on the monotonic clock."""
        self._reading = asyncio.Lock()

    async def find(self, token: str) -> ApiKey | None:
        """The key with this token, if it is valid. Raises LedgerUnavailable."""
        key_id = key_id_of(token)
        if key_id is None:
            return None
        now_s = time.monotonic()
        await self._read_since(now_s - FRESH_S)
        if key_id not in self._valid:
            await self._read_since(now_s)
        key = self._valid.get(key_id)
        return key if key is not None and key.matches(token) else None

    async def valid(self, key: ApiKey) -> bool:
        """Whether a key that was found before is still valid. Raises LedgerUnavailable."""
        await self._read_since(time.monotonic() - FRESH_S)
        return key.id in self._valid

    async def _read_since(self, moment_s: float) -> None:
        """Have keys that were read at `moment_s` or later."""
        if self._read_s >= moment_s:
            return
        async with self._reading:
            if self._read_s >= moment_s:
                return
            await asyncio.sleep(max(0.0, self._read_s + PACE_S - time.monotonic()))
            began_s = time.monotonic()
            try:
                keys = await self._threads.call(self._ledger_keys.list, usable=True)
            except LedgerUnavailable:
                if began_s - self._read_s > STALE_S:
                    raise
                return
            self._valid = {key.id: key for key in keys}
            self._read_s = began_s
