"""Python's collector of cycles, kept away from what is loaded once and stays.

Libraries and a model are some 300,000 objects. To look through them takes a fifth of a worker's start, and later, every
now and then, a good part of a second in which no thread does anything: no step, no lease, no cancellation.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""New objects between two looks at them. At Python's own 700 a job's share of the looks was a twentieth of its cost."""


def postpone() -> None:
    """Collect nothing while the worker loads."""
    gc.disable()


def resume() -> None:
    """Collect what loading left behind, and from now on only among what comes after it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)
    gc.enable()
