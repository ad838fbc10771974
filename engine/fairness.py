"""Tenants' shares of the engine, counted in tokens. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_FORGET_AT = 1024
"""Tenants that are remembered before those who can be forgotten are."""


class FairShare:
    """Start-time fair queueing (Goyal, Vin, Cheng 1997) over tenants, with tokens as the length of a job.

    Each tenant has a virtual time: the tokens it was charged, divided by its weight. Of those who wait,
    the one with the least goes first. The floor is the virtual time of the last one that went; who
    comes back after a pause starts there, so that a pause earns nothing and costs nothing.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._time: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._floor = 0.0
        self._forget_at = _FORGET_AT

    def time(self, tenant: str) -> float:
        """The tenant's virtual time."""
        return self._time.get(tenant, self._floor)

    def enter(self, tenant: str) -> None:
        """One more request of the tenant waits for its first turn."""
        if not self._waiting[tenant]:
            self._time[tenant] = max(self.time(tenant), self._floor)
            if len(self._time) > self._forget_at:
                self._forget()
        self._waiting[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One request of the tenant waits no more, whatever the cause."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def begin(self, tenant: str, tokens: int) -> None:
        """It is the tenant's turn, with a request that costs `tokens` at once."""
        self._floor = max(self._floor, self.time(tenant))
        self.charge(tenant, tokens)

    def charge(self, tenant: str, tokens: int) -> None:
        """The tenant was given `tokens` more."""
        self._time[tenant] = self.time(tenant) + tokens / self._weights.get(tenant, 1.0)

    def _forget(self) -> None:
        """Drop tenants whose return would be that of a new one; of too many debtors the smaller debts lapse."""
        idle = sorted(time for tenant, time in self._time.items() if tenant not in self._waiting)
        lapse = idle[len(idle) // 2] if idle else self._floor
        self._floor = max(self._floor, lapse)
        self._time = {t: time for t, time in self._time.items() if time > self._floor or t in self._waiting}
        self._forget_at = max(_FORGET_AT, 2 * len(self._time))
