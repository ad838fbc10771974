"""Ids tell when they were made."""

from __future__ import annotations

import uuid

import pytest
from headrace.contract import id_age_s, new_job_id


def test_ids_sort_by_their_time_and_tell_it() -> None:
    earlier, later = new_job_id(1_900_000_000.0), new_job_id(1_900_000_002.5)
    assert earlier < later
    assert uuid.UUID(earlier).version == 7
    assert id_age_s(earlier, 1_900_000_010.0) == pytest.approx(10.0)


@pytest.mark.parametrize(
    "job_id", [str(uuid.uuid4()), "order-17", new_job_id(1_900_000_060.0), new_job_id(1_800_000_000.0)]
)
def test_ids_that_cannot_tell_are_of_age_zero(job_id: str) -> None:
    assert id_age_s(job_id, 1_900_000_000.0) == 0.0
