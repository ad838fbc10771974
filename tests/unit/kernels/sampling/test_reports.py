"""Log-probabilities and ranks of what was drawn or forced."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.protocol import Kernels
from kernels.sampling import Adjustment
from tests.unit.kernels.sampling.rows import VOCAB, batch, drawn, logits, order


class TestLogprobs:
    def test_are_the_raw_log_softmax_whatever_is_sampled(self, kernels: Kernels) -> None:
        """https://github.com/vllm-project/vllm/issues/9453"""
        rows = torch.cat([logits(1, seed=i) for i in range(4)])
        exact = rows.double().log_softmax(-1)
        packed = ((1 << 40) | (1 << 41)).to_bytes(-(-VOCAB // 8), "little")
        sampled = kernels.sample(
            rows.clone(),
            batch(
                4, temperature=(0.0, 2.0, 0.3, 1.0), top_p=(1.0, 0.5, 0.2, 1.0), logprobs=(0, 5, 20, 3), banned=(1, 2),
                adjust=(None, Adjustment(bias=((9, 50.0),)), Adjustment([5, 6], 1, 2.0), Adjustment(allowed=packed)),
            ),
        )  # fmt: skip
        assert sampled.logprobs is not None
        for row, (token, report, count) in enumerate(zip(sampled.tokens, sampled.logprobs, (0, 5, 20, 3), strict=True)):
            assert report is not None
            assert report.token == token
            assert report.logprob == pytest.approx(float(exact[row, token]), abs=1e-4)
            assert report.rank == order(rows[row]).index(token) + 1
            assert [i for i, _ in report.top] == order(rows[row])[:count]
            assert [p for _, p in report.top] == pytest.approx(exact[row, order(rows[row])[:count]].tolist(), abs=1e-4)
        assert sampled.tokens[3] in (40, 41)

    def test_equal_logits_stand_in_order_of_their_ids(self, kernels: Kernels) -> None:
        rows = torch.zeros(1, VOCAB)
        rows[0, [800, 20]] = 1.0
        [report] = kernels.sample(rows.clone(), batch(1, temperature=0.0, logprobs=5)).logprobs or []
        assert report is not None
        assert [token for token, _ in report.top] == [20, 800, 0, 1, 2]
        assert (report.token, report.rank) == (20, 1)
        forced = kernels.sample(rows.repeat(3, 1), batch(3, logprobs=1, forced=(800, 0, 999))).logprobs or []
        assert [report.rank for report in forced if report] == [2, 3, VOCAB]

    def test_rows_that_report_nothing(self, kernels: Kernels) -> None:
        assert kernels.sample(logits(2), batch(2)).logprobs is None
        mixed = kernels.sample(logits(3), batch(3, logprobs=(-1, 0, -1))).logprobs
        assert mixed is not None
        assert [report is not None for report in mixed] == [False, True, False]

    def test_reporting_changes_no_token(self, kernels: Kernels) -> None:
        rows = logits(300)
        assert drawn(kernels, rows, logprobs=20) == drawn(kernels, rows)

    def test_a_vocabulary_smaller_than_what_is_asked_for(self, kernels: Kernels) -> None:
        [report] = kernels.sample(torch.zeros(1, 5), batch(1, logprobs=20)).logprobs or []
        assert report is not None
        assert [token for token, _ in report.top] == [0, 1, 2, 3, 4]

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        row=st.lists(st.sampled_from([-1e30, -50.0, -1.0, 0.0, 0.5, 30.0]), min_size=1, max_size=40),
        count=st.integers(0, 20),
        data=st.data(),
    )
    def test_any_row_is_its_definition(
        self, kernels: Kernels, row: list[float], count: int, data: st.DataObject
    ) -> None:
        token = data.draw(st.integers(0, len(row) - 1))
        rows = torch.tensor([row])
        [report] = kernels.sample(rows.clone(), batch(1, logprobs=count, forced=(token,))).logprobs or []
        assert report is not None
        exact = rows[0].double().log_softmax(-1)
        ranked = order(rows[0])
        assert (report.token, report.rank) == (token, ranked.index(token) + 1)
        assert report.logprob == pytest.approx(float(exact[token]), abs=1e-4, rel=1e-6)
        assert [i for i, _ in report.top] == ranked[:count]


class TestForced:
    def test_a_forced_row_is_scored_and_not_sampled(self, kernels: Kernels) -> None:
        rows = torch.cat([logits(1, seed=i) for i in range(5)])
        free = drawn(kernels, rows)
        sampled = kernels.sample(rows.clone(), batch(5, forced=(-1, 0, -1, 999, -1), logprobs=(-1, 2, 2, 0, -1)))
        assert sampled.tokens == [free[0], 0, free[2], 999, free[4]]
        assert sampled.logprobs is not None
        for row in (1, 3):
            report = sampled.logprobs[row]
            assert report is not None
            assert report.token == sampled.tokens[row]
            assert report.rank == order(rows[row]).index(report.token) + 1
