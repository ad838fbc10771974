"""When drafts pay."""

from __future__ import annotations

from typing import Any

import pytest

from engine.pace import StepTimes, best_count


class TestPays:
    def times(self, *, each_s: float = 1.0, row_s: float = 0.0) -> Any:
        return lambda tokens: each_s + row_s * tokens

    @pytest.mark.parametrize(
        ("trust", "draft_s", "count"),
        [(1.0, 0.1, 4), (0.9, 0.1, 4), (0.5, 0.1, 2), (0.2, 0.1, 1), (0.05, 0.1, 0), (0.9, 1.0, 0), (0.9, 0.5, 3)],
    )
    def test_as_many_are_made_as_bring_more_than_they_cost(self, trust: float, draft_s: float, count: int) -> None:
        assert best_count([trust], 1, 4, self.times(), draft_s) == count

    def test_rows_that_cost_are_counted(self) -> None:
        assert best_count([0.8] * 8, 8, 4, self.times(), 0.1) == 4
        assert best_count([0.8] * 8, 8, 4, self.times(each_s=0.1, row_s=0.2), 0.1) == 0

    def test_what_was_never_tried_looks_cheap(self) -> None:
        times = StepTimes()
        assert times.estimate_s(5) == 0.0
        times.note(2, 1.0)
        assert times.estimate_s(5) == 1.0
        times.note(5, 3.0)
        assert (times.estimate_s(4), times.estimate_s(5), times.estimate_s(900)) == (1.0, 3.0, 3.0)
        for _ in range(40):
            times.note(5, 2.0)
        assert times.estimate_s(5) == pytest.approx(2.0, abs=0.01)
