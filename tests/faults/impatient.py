"""Loaded into a worker with `-I tests.faults.impatient`: it takes itself for stuck after seconds, and not minutes."""

from __future__ import annotations

from worker import liveness

liveness.HUB_S = liveness.STARVED_S = liveness.STALLED_S = 3.0
