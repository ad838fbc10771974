"""How torch's threads wait for each other. No torch here."""

from __future__ import annotations

import os

SPIN_COUNT = "1000"
"""Rounds that a thread of GNU OpenMP spins before it sleeps.

Its default, 300,000, suits a machine of one's own: a decode step of one sequence is about 15 % faster
with it. But as soon as another process takes a core, the hundreds of barriers of a step wait for that
process's time slices, and the step takes 5 to 10 times as long. The queue, the API and the engine share
cores.
"""


def wait_briefly() -> None:
    """Let waiting threads give up their core soon. Has to run before torch is first imported; a user's own
    `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` stays in force."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
