"""What comes out: the same tokens whatever else happens, seeds, and numbers about it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.fake import FakeModel
from engine.request import FinishReason
from kernels.sampling import Sampled
from tests.unit.engine.bench import make_bench


class TestOutputs:
    """The same tokens, whatever else happens."""

    REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8)

    @settings(max_examples=60, deadline=None)
    @given(requests=REQUESTS, pages=st.integers(18, 60), budget=st.integers(1, 40), seqs=st.integers(1, 8))
    def test_do_not_depend_on_memory_chunks_or_neighbours(
        self, requests: list[tuple[int, int]], pages: int, budget: int, seqs: int
    ) -> None:
        """https://github.com/vllm-project/vllm/issues/16832, https://github.com/vllm-project/vllm/issues/5952"""
        tight = make_bench(pages=pages, max_num_batched_tokens=budget, max_num_seqs=seqs)
        for number, (prompt, output) in enumerate(requests):
            tight.add(str(number), "p" * prompt, max_tokens=output)
        outputs = tight.run()
        alone = make_bench()
        for number, (prompt, output) in enumerate(requests):
            expected = alone.one("p" * prompt, max_tokens=output)
            found = outputs[str(number)]
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
            assert found.finish_reason is FinishReason.LENGTH

    @pytest.mark.parametrize(("pages", "least", "most"), [(1000, 0, 0), (36, 1, 1), (10, 5, 10_000)])
    def test_are_equal_with_none_one_and_many_preemptions(self, pages: int, least: int, most: int) -> None:
        """https://github.com/vllm-project/vllm/issues/16832"""
        bench = make_bench(pages=pages, enable_prefix_caching=False)
        for number in range(6):
            bench.add(str(number), "prompt", max_tokens=20 + number)
        outputs = bench.run()
        assert least <= bench.engine.stats().preemptions <= most
        assert sum(output.metrics.preemptions for output in outputs.values()) == bench.engine.stats().preemptions
        for number in range(6):
            assert outputs[str(number)].text == make_bench().one("prompt", max_tokens=20 + number).text

    def test_each_request_is_admitted_once_even_if_preempted(self) -> None:
        bench = make_bench(pages=10)
        for number in range(4):
            bench.add(str(number), "prompt", max_tokens=20)
        bench.run()
        assert bench.engine.stats().preemptions > 0
        assert sorted(bench.admitted) == ["0", "1", "2", "3"]

    def test_urgent_requests_end_first(self) -> None:
        bench = make_bench(max_num_seqs=1)
        for number, priority in enumerate([6, 6, 0, 3]):
            bench.add(str(number), "prompt", priority=priority)
        assert list(bench.run()) == ["2", "3", "0", "1"]


class TestSampling:
    def seeds_seen(self, *seeds: int | None) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []

        class Watched(FakeModel):
            def execute(self, batch: Batch) -> Sampled:
                seen.append(batch.sampling.seed)
                return super().execute(batch)

        bench = make_bench(Watched())
        for number, seed in enumerate(seeds):
            bench.add(str(number), "p", max_tokens=3, seed=seed, temperature=1.0)
        bench.run()
        return seen

    def test_a_seed_is_kept_beside_a_neighbour_without_one(self) -> None:
        """https://github.com/vllm-project/vllm/issues/51226"""
        assert {row[1] for row in self.seeds_seen(None, 42)} == {42}

    def test_a_seed_is_drawn_once_if_none_is_given(self) -> None:
        [first] = {row[0] for row in self.seeds_seen(None)}
        [second] = {row[0] for row in self.seeds_seen(None)}
        assert 0 <= first < 2**63
        assert first != second


class TestMetrics:
    def test_moments_are_in_order_and_batch_sizes_are_those_of_the_steps(self) -> None:
        bench = make_bench()
        bench.add("a", "p", max_tokens=6)
        bench.step()
        bench.step()
        bench.add("b", "p", max_tokens=2)
        outputs = bench.run()
        for output in outputs.values():
            metrics = output.metrics
            moments = [
                metrics.arrived_s, metrics.admitted_s, metrics.first_token_s, metrics.last_token_s, metrics.finished_s
            ]  # fmt: skip
            assert None not in moments
            assert moments == sorted(moments)  # type: ignore[type-var]
        assert (outputs["a"].metrics.mean_batch_size, outputs["a"].metrics.max_batch_size) == (8 / 6, 2)
        assert (outputs["b"].metrics.mean_batch_size, outputs["b"].metrics.max_batch_size) == (2.0, 2)

    @pytest.mark.in_turn
    def test_stats_count_what_happened(self) -> None:
        bench = make_bench(max_num_seqs=2)
        for number in range(3):
            bench.add(str(number), f"prompt{number}"[::-1], max_tokens=4)
        stats = bench.engine.stats()
        assert (stats.running, stats.waiting, stats.max_num_seqs, stats.pages_total) == (0, 3, 2, 1000)
        bench.step()
        stats = bench.engine.stats()
        assert (stats.running, stats.waiting, stats.steps, stats.prompt_tokens) == (2, 1, 1, 14)
        bench.run()
        stats = bench.engine.stats()
        assert (stats.prompt_tokens, stats.generation_tokens, stats.max_batch_size) == (21, 12, 2)
        assert stats.requests_finished == {"length": 3}

    def test_the_admission_cap_can_be_changed(self) -> None:
        bench = make_bench(max_num_seqs=4)
        bench.engine.set_max_num_seqs(0)
        bench.add("a", "p")
        assert not bench.engine.has_work
        bench.engine.set_max_num_seqs(1)
        assert bench.run()["a"].finish_reason is FinishReason.LENGTH
