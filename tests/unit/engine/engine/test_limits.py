"""What is refused at the engine's door."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from headrace.contract import Reason

from engine.fake import FakeModel, fake_text
from engine.request import EngineRequest, FinishReason, RequestRefused, SamplingParams
from tests.unit.engine.bench import make_bench


class TestLimits:
    def test_a_request_beyond_the_context_is_refused_with_both_numbers(self) -> None:
        """https://github.com/vllm-project/vllm/issues/765, https://github.com/vllm-project/vllm/issues/1673"""
        bench = make_bench(max_seq_len=20)
        with pytest.raises(RequestRefused, match=r"50 tokens.*20") as refused:
            bench.add("a", "x" * 50)
        assert refused.value.code == Reason.CONTEXT_LENGTH_EXCEEDED
        assert not bench.engine.has_work

    def test_the_last_place_in_the_context_gives_exactly_one_token(self) -> None:
        """https://github.com/vllm-project/vllm/issues/16445"""
        bench = make_bench(max_seq_len=20)
        output = bench.one("x" * 19, max_tokens=10)
        assert (len(output.token_ids), output.finish_reason) == (1, FinishReason.LENGTH)
        with pytest.raises(RequestRefused):
            bench.add("a", "x" * 20)

    def test_max_tokens_is_cut_to_the_context(self) -> None:
        bench = make_bench(max_seq_len=20)
        output = bench.one("x" * 15, max_tokens=10_000)
        assert (len(output.token_ids), output.finish_reason) == (5, FinishReason.LENGTH)

    def test_the_context_is_no_longer_than_the_models_own(self) -> None:
        """https://github.com/sgl-project/sglang/issues/28530"""
        assert make_bench(max_seq_len=500).engine.max_seq_len == 500
        assert make_bench(FakeModel(context_len=300), max_seq_len=500).engine.max_seq_len == 300
        small = make_bench(pages=3)
        assert small.engine.max_seq_len == 12
        assert len(small.one("x" * 4, max_tokens=100).token_ids) == 8
        with pytest.raises(RequestRefused, match=r"13 tokens.*12"):
            small.add("a", "x" * 13)

    @pytest.mark.parametrize(
        ("prompt", "params"),
        [("", {}), ((), {}), ((1, 10**6), {}), ((-1,), {}), ("x", {"stop_token_ids": (10**6,)}), ("\ud800", {})],
    )
    def test_a_bad_request_is_refused_and_its_neighbours_go_on(
        self, prompt: str | tuple[int, ...], params: dict[str, Any]
    ) -> None:
        """https://github.com/vllm-project/vllm/issues/6866"""
        bench = make_bench()
        bench.add("good", "x")
        bench.step()
        with pytest.raises(RequestRefused) as refused:
            bench.add("bad", prompt, **params)
        assert refused.value.code == Reason.INVALID_REQUEST
        assert list(bench.run()) == ["good"]

    def test_a_chat_is_templated_and_a_refusal_is_the_templates(self) -> None:
        bench = make_bench()
        bench.engine.add(EngineRequest("a", SamplingParams(), messages=({"role": "user", "content": "hi"},)))
        ids = bench.run()["a"].prompt_token_ids
        assert ids == tuple(bench.engine.tokenizer.encode_prompt("<|user|>hi<|end|><|assistant|>"))
        text = replace(fake_text(), chat_template="{{ raise_exception('no') }}")
        with pytest.raises(RequestRefused, match="no") as refused:
            make_bench(FakeModel(text=text)).engine.add(
                EngineRequest("a", SamplingParams(), messages=({"role": "user", "content": "hi"},))
            )
        assert refused.value.code == Reason.TEMPLATE_ERROR

    def test_an_id_in_use_is_refused(self) -> None:
        bench = make_bench()
        bench.add("a", "x")
        with pytest.raises(ValueError, match="in the engine already"):
            bench.add("a", "x")
