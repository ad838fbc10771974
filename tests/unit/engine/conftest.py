"""Tests of engines over models without weights run twice: with each step by itself, and with overlapping ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.engine import bench


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test of a module that makes benches, but for those that are about the steps themselves (`in_turn`)."""
    if hasattr(metafunc.module, "make_bench") and not metafunc.definition.get_closest_marker("in_turn"):
        metafunc.parametrize("overlap", [False, True], ids=["in turn", "overlapped"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def overlap(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the benches of this test overlap their steps."""
    overlaps = bool(getattr(request, "param", False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "OVERLAP", overlaps)
        yield overlaps
