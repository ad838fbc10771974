"""Prefixes shared between requests: what is found, what is waited for, and that no token depends on it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fake import FakeModel
from engine.memory import PagePool
from engine.request import EngineRequest, FinishReason, SamplingParams
from engine.sequence import TokenSequence
from engine.sharing import PrefixSharing
from tests.unit.engine.bench import Bench, RaisingModel, expected, make_bench

PREFIX = "a prefix of forty-eight tokens that many requests share"[:48]


class CountingModel(FakeModel):
    """Counts the tokens that it computes."""

    computed = 0

    def execute(self, batch):  # type: ignore[no-untyped-def]
        self.computed += len(batch.token_ids)
        return super().execute(batch)


def counting_bench(**config: object) -> tuple[Bench, CountingModel]:
    model = CountingModel()
    return make_bench(model, **config), model  # type: ignore[arg-type]


class TestHits:
    @pytest.mark.parametrize(
        ("prompt", "cached"), [(47, 44), (48, 44), (49, 48), (4, 0), (5, 4), (1, 0)], ids=lambda n: str(n)
    )
    def test_whole_pages_are_found_and_at_least_one_token_is_computed(self, prompt: int, cached: int) -> None:
        """https://github.com/GeeeekExplorer/nano-vllm/issues/211"""
        bench = make_bench()
        whole = (PREFIX + "x")[:prompt]
        first = bench.one(whole, max_tokens=1)
        second = bench.one(whole, max_tokens=1)
        assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, cached)
        assert first.token_ids == second.token_ids

    def test_an_answer_is_found_by_the_next_turn(self) -> None:
        bench = make_bench()
        first = bench.one("question", max_tokens=9)
        second = bench.one("question" + first.text + " next", max_tokens=4)
        assert second.metrics.cached_tokens == 16  # the last token of the answer was never computed

    def test_an_edited_history_is_found_up_to_the_edit_only(self) -> None:
        """https://github.com/vllm-project/vllm/issues/49449"""
        for at in range(len(PREFIX)):
            bench = make_bench()
            bench.one(PREFIX)
            edited = bench.one(PREFIX[:at] + "#" + PREFIX[at + 1 :])
            assert edited.metrics.cached_tokens == at // 4 * 4
            assert edited.token_ids == expected(PREFIX[:at] + "#" + PREFIX[at + 1 :], 8)

    def test_a_page_is_found_behind_the_same_pages_only(self) -> None:
        for prompt in (PREFIX[4:], PREFIX[4:8] + PREFIX[:4] + PREFIX[8:]):
            bench = make_bench()
            bench.one(PREFIX)
            assert bench.one(prompt).metrics.cached_tokens == 0

    def test_namespaces_share_nothing(self) -> None:
        """https://github.com/vllm-project/vllm/issues/30931"""
        bench = make_bench()
        for name, namespace in [("a", "one"), ("b", "two"), ("c", "one"), ("d", "")]:
            bench.add(name, PREFIX, namespace=namespace)
            bench.run()
        assert [bench.outputs[name].metrics.cached_tokens for name in "abcd"] == [0, 0, 44, 0]

    def test_a_model_of_another_revision_shares_nothing(self) -> None:
        """https://github.com/vllm-project/vllm/issues/42125"""
        request = EngineRequest("a", SamplingParams(), PREFIX)
        roots = set()
        for revision in ("1", "2", "2"):
            engine = make_bench(FakeModel(revision=revision)).engine
            roots |= {generation.sequence.root for generation in engine.prepare(request, 0.0).generations}
        assert len(roots) == 2

    def test_it_can_be_turned_off(self) -> None:
        bench = make_bench(enable_prefix_caching=False)
        assert [bench.one(PREFIX).metrics.cached_tokens for _ in range(2)] == [0, 0]
        assert bench.engine.stats().pages_free == 1000

    def test_a_failed_step_publishes_nothing(self) -> None:
        broken = [True]
        bench = make_bench(RaisingModel(lambda batch: bool(broken) and batch.known_tokens[0] != [0]))
        assert bench.one(PREFIX).finish_reason is FinishReason.ERROR
        broken.clear()
        assert bench.one(PREFIX).metrics.cached_tokens == 0

    def test_a_request_that_returns_finds_what_it_had_computed(self) -> None:
        """https://github.com/GeeeekExplorer/nano-vllm/issues/233"""
        bench, model = counting_bench(pages=24, swap_space_bytes=0)
        bench.add("urgent", "u" * 6, max_tokens=60)
        bench.step()
        bench.add("low", PREFIX, priority=1, max_tokens=30)
        outputs = bench.run()
        assert outputs["low"].metrics.preemptions >= 1
        assert outputs["low"].metrics.cached_tokens == 0
        assert outputs["low"].token_ids == expected(PREFIX, 30)
        again = outputs["low"].metrics.preemptions * 48
        assert model.computed < 6 + 60 + 48 + 30 + again


class TestInFlight:
    def test_requests_with_one_prompt_compute_it_once(self) -> None:
        bench, model = counting_bench()
        for number in range(8):
            bench.add(str(number), PREFIX + f"{number} tail", max_tokens=1)
        outputs = bench.run()
        assert model.computed == 48 + 8 * 6
        assert [outputs[str(n)].metrics.cached_tokens for n in range(8)] == [0] + [48] * 7

    def test_a_long_prompt_that_comes_in_chunks_is_waited_for(self) -> None:
        bench, model = counting_bench(max_num_batched_tokens=16)
        for number in range(3):
            bench.add(str(number), "x" * 100 + str(number), max_tokens=1)
        bench.run()
        assert model.computed == 101 + 2

    def test_others_pass_those_that_wait_for_a_prefix(self) -> None:
        bench = make_bench(max_num_batched_tokens=16)
        bench.add("first", "x" * 100, max_tokens=1)
        bench.add("same", "x" * 100, max_tokens=1)
        bench.add("other", "y" * 8, max_tokens=1)
        bench.step()
        bench.step()
        assert bench.admitted == ["first", "other"]
        assert set(bench.outputs) == {"other"}
        bench.run()

    def test_little_in_common_is_not_waited_for(self) -> None:
        bench = make_bench()
        bench.add("a", "same" + "a" * 20, max_tokens=1)
        bench.add("b", "same" + "b" * 20, max_tokens=1)
        bench.step()
        assert bench.admitted == ["a", "b"]

    def test_who_waits_goes_on_alone_when_the_other_leaves(self) -> None:
        """https://github.com/LMCache/LMCache/issues/3688"""
        for at in range(8):
            bench, model = counting_bench(max_num_batched_tokens=16)
            bench.add("a", "x" * 100, max_tokens=1)
            bench.add("b", "x" * 100, max_tokens=1)
            for _ in range(at):
                bench.step()
            bench.engine.abort("a")
            outputs = bench.run()
            assert outputs["b"].finish_reason is FinishReason.LENGTH
            assert model.computed <= 100 + 16

    def test_an_urgent_request_waits_for_no_prompt_of_a_lower_class(self) -> None:
        bench = make_bench(max_num_batched_tokens=16)
        bench.add("low", "x" * 100, priority=1, max_tokens=1)
        bench.step()
        bench.add("urgent", "x" * 100, max_tokens=1)
        bench.step()
        assert bench.admitted == ["low", "urgent"]
        bench.run()


class TestEqual:
    """Tokens don't depend on what is cached."""

    PROMPTS = st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from(["", "a", "bc", "defgh" * 4]), st.integers(1, 12)),
        min_size=1,
        max_size=10,
    )

    @settings(max_examples=60, deadline=None)
    @given(data=st.data(), requests=PROMPTS, pages=st.integers(21, 80), budget=st.sampled_from([1, 7, 16, 17, 1024]))
    def test_cold_warm_after_a_stop_and_after_an_abort(
        self, data: st.DataObject, requests: list[tuple[int, str, int]], pages: int, budget: int
    ) -> None:
        """https://github.com/vllm-project/vllm/issues/5543"""
        bench = make_bench(pages=pages, max_num_batched_tokens=budget, max_num_seqs=4)
        whole = {}
        for number, (shared, tail, output) in enumerate(requests):
            prompt = (PREFIX + "zz")[:shared] + tail + "."
            name = str(number)
            bench.add(name, prompt, max_tokens=output)
            whole[name] = expected(prompt, output)
            for _ in range(data.draw(st.integers(0, 6))):
                bench.step()
            if data.draw(st.integers(0, 4)) == 0:
                bench.engine.abort(str(data.draw(st.integers(0, number))))
                bench.engine.check()
        for name, output in bench.run().items():
            if output.finish_reason is FinishReason.ABORT:
                assert output.token_ids == whole[name][: len(output.token_ids)]
            else:
                assert output.token_ids == whole[name]

    def test_a_warm_cache_is_used_by_every_length_around_a_page(self) -> None:
        bench = make_bench()
        for length in [*range(1, 20), *range(19, 0, -1)]:
            assert bench.one("x" * length).token_ids == expected("x" * length, 8)


def test_check_sees_a_page_that_nobody_will_compute() -> None:
    sharing = PrefixSharing(PagePool(4, 4))
    sequence = TokenSequence("a", [1] * 8, prompt_tokens=8, max_len=9, root=b"r")
    sharing.begin(sequence, 0)
    sharing.check([sequence])
    with pytest.raises(AssertionError, match="doesn't run"):
        sharing.check([])


@pytest.mark.parametrize("caching", [True, False])
def test_completions_of_one_prompt_compute_it_once(caching: bool) -> None:
    """Without a prefix cache they share among themselves and with nobody else."""
    bench, model = counting_bench(enable_prefix_caching=caching)
    bench.add("a", PREFIX, n=4, max_tokens=1)
    bench.run()
    assert model.computed == 48 + 3 * 4
    bench.add("b", PREFIX, n=4, max_tokens=1)
    bench.run()
    assert model.computed == (60 + 4 * 4 if caching else 2 * 60)
