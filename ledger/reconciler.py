"""Finds queued jobs whose message the broker has lost, and has them published again.

The Redis transport loses a message if a worker dies between taking it and noting that it did, and a broker may come
back empty. Nothing tells; so what the ledger has queued is compared with what the broker holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from headrace.contract import JobStatus

from ledger.contract import LedgerProtocol

SETTLED_S = 2.0
"""A job is looked for once it has been queued this long."""
SURVEY_S = 30.0
"""A full comparison is made at least this often: equal counts may hide a loss behind doubles or raw messages."""
SURVEY_SHARE = 0.05
"""No more of the time than this goes into full comparisons that the counts gave no reason for."""
MAX_JOBS = 50_000
"""Queued jobs of one model that are looked for, the longest queued first."""


class BrokerView(Protocol):
    """What can be asked about the messages that the broker holds."""

    def depth(self, models: Sequence[str]) -> int:
        """How many there are for these models, those with live workers included."""
        ...

    def held(self, models: Sequence[str]) -> set[str]:
        """The ids of their jobs."""
        ...


class Reconciler:
    """Keeps, between rounds, which jobs were missing: one that is missing twice running is published again.

    One look may miss a message on its way from the queue to a worker; what is published twice, the claim drops.
    """

    def __init__(self, ledger: LedgerProtocol, broker: BrokerView) -> None:
        self._ledger = ledger
        self._broker = broker
        self._missing: frozenset[str] = frozenset()
        self._next_survey_s = 0.0

    def round(self) -> int:
        """Compare once. Returns how many jobs were given back to the outbox."""
        sent = self._ledger.sent_counts()
        models = sorted(model for model, counts in sent.items() if counts.get(JobStatus.QUEUED))
        if not models:
            self._missing = frozenset()
            return 0
        expected = sum(sum(counts.values()) for counts in sent.values())
        surveyed = not self._missing and time.monotonic() < self._next_survey_s
        if surveyed and self._broker.depth(sorted(sent)) >= expected:
            return 0
        missing = self._survey(models)
        lost = missing & self._missing
        self._missing = missing - lost
        return self._ledger.republish(sorted(lost))

    def _survey(self, models: Sequence[str]) -> frozenset[str]:
        began_s = time.monotonic()
        queued = {dispatch.job_id for model in models for dispatch in self._ledger.queued(model, SETTLED_S, MAX_JOBS)}
        missing = frozenset(queued - self._broker.held(models)) if queued else frozenset()
        took_s = time.monotonic() - began_s
        self._next_survey_s = began_s + max(SURVEY_S, took_s / SURVEY_SHARE)
        return missing
