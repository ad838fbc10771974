"""What ends a text: strings, ids, the end of text, and a number of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fake import END_ID, fake_text
from engine.request import FinishReason
from tests.unit.engine.bench import make_bench, scripted


class TestStopping:
    def test_a_stop_string_that_spans_tokens_leaks_no_part_of_itself(self) -> None:
        """https://github.com/vllm-project/vllm/issues/3672"""
        bench = make_bench(scripted(list(b"yes\nUser: no")))
        output = bench.one("p", max_tokens=50, stop="\nUser:")
        assert (output.text, output.finish_reason, output.stop_reason) == ("yes", FinishReason.STOP, "\nUser:")
        assert len(output.token_ids) == len(b"yes\nUser:")

    def test_a_stop_string_may_be_included(self) -> None:
        """https://github.com/vllm-project/vllm/issues/1973"""
        bench = make_bench(scripted(list(b"yes. no")))
        output = bench.one("p", stop=(".",), include_stop_str_in_output=True)
        assert (output.text, output.stop_reason) == ("yes.", ".")

    def test_a_stop_string_that_is_never_complete_is_shown(self) -> None:
        """https://github.com/ggml-org/llama.cpp/issues/9867"""
        bench = make_bench(scripted(list(b"42</ans")))
        output = bench.one("p", max_tokens=7, stop="</answer>")
        assert (output.text, output.finish_reason, output.stop_reason) == ("42</ans", FinishReason.LENGTH, None)

    def test_a_stop_string_in_the_prompt_stops_nothing(self) -> None:
        bench = make_bench(scripted(list(b"bc"), prompt_tokens=2))
        assert bench.one("xa", max_tokens=4, stop="ab").text == "bcbc"

    def test_no_stop_string_fires_before_min_tokens(self) -> None:
        """https://github.com/vllm-project/vllm/issues/21987"""
        bench = make_bench(scripted(list(b"a.b.c.d.")))
        for least, text in [(0, "a"), (1, "a"), (2, "a.b"), (4, "a.b.c"), (5, "a.b.c"), (6, "a.b.c.d")]:
            assert bench.one("p", stop=".", min_tokens=least).text == text

    def test_a_stop_string_that_began_before_min_tokens_fires_after(self) -> None:
        bench = make_bench(scripted(list(b"a--b")))
        assert bench.one("p", stop="--", min_tokens=2).text == "a"

    def test_no_token_ends_it_before_min_tokens(self) -> None:
        """https://github.com/vllm-project/vllm/issues/21987"""
        all_params: list[dict[str, Any]] = [{}, {"stop_token_ids": (ord("x"),), "ignore_eos": True}]
        for params in all_params:
            wanted = ord("x") if params else END_ID
            bench = make_bench(scripted([wanted]))
            output = bench.one("p", min_tokens=3, **params)
            assert wanted not in output.token_ids[:3]
            assert output.token_ids[3] == wanted
            assert (len(output.token_ids), output.finish_reason) == (4, FinishReason.STOP)

    def test_every_end_of_text_id_counts(self) -> None:
        """https://github.com/vllm-project/vllm/issues/5849"""
        text = replace(fake_text(), eos_token_ids=(END_ID, END_ID + 1))
        for end in text.eos_token_ids:
            output = make_bench(scripted([97, end], text=text)).one("p")
            assert (output.text, output.finish_reason, output.stop_reason) == ("a", FinishReason.STOP, None)
            assert output.token_ids == (97, end)

    def test_ignore_eos_leaves_the_users_stop_ids_in_force(self) -> None:
        """https://github.com/vllm-project/vllm/issues/4589"""
        bench = make_bench(scripted([97, END_ID, 98, 99, 100]))
        output = bench.one("p", ignore_eos=True, stop_token_ids=(99,))
        assert (output.text, output.stop_reason) == ("ab", 99)
        assert bench.one("p", ignore_eos=True, max_tokens=5).text == "abcd"

    def test_a_user_may_list_the_end_of_text_as_a_stop_id_and_ignore_it_as_an_end(self) -> None:
        """https://github.com/vllm-project/vllm/issues/4589"""
        bench = make_bench(scripted([97, END_ID]))
        assert bench.one("p", ignore_eos=True, stop_token_ids=(END_ID,)).stop_reason == END_ID

    def test_the_caller_learns_which_stop_fired(self) -> None:
        """https://github.com/vllm-project/vllm/issues/1973"""
        bench = make_bench(scripted(list(b"ab.c")))
        assert bench.one("p", stop=("c", ".")).stop_reason == "."
        assert bench.one("p", stop_token_ids=(98, 99)).stop_reason == 98
        assert bench.one("p").stop_reason is None

    def test_a_stop_id_has_no_text_unless_it_is_to_be_included(self) -> None:
        bench = make_bench(scripted(list(b"ab.c")))
        assert bench.one("p", stop_token_ids=(ord("."),)).text == "ab"
        assert bench.one("p", stop_token_ids=(ord("."),), include_stop_str_in_output=True).text == "ab."

    def test_held_text_is_shown_when_a_token_ends_it(self) -> None:
        """https://github.com/ggml-org/llama.cpp/issues/9867"""
        bench = make_bench(scripted([*b"ab", END_ID]))
        assert bench.one("p", stop="bc").text == "ab"

    @pytest.mark.parametrize("prompt", ["p", "<<raise>>"])
    def test_no_tokens_asked_for_is_an_empty_text(self, prompt: str) -> None:
        """https://github.com/GeeeekExplorer/nano-vllm: `max_tokens=0` never stopped."""
        bench = make_bench()
        output = bench.one(prompt, max_tokens=0)
        assert (output.text, output.token_ids, output.finish_reason) == ("", (), FinishReason.LENGTH)
        assert bench.engine.stats().steps == 0

    @given(
        script=st.lists(st.sampled_from(b"ab\n"), min_size=1, max_size=12),
        stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
        max_tokens=st.integers(1, 20),
        data=st.data(),
    )
    def test_text_is_what_a_search_of_the_whole_output_gives(
        self, script: list[int], stops: list[str], max_tokens: int, data: st.DataObject
    ) -> None:
        least = data.draw(st.integers(0, max_tokens))
        output = make_bench(scripted(script)).one("p", max_tokens=max_tokens, min_tokens=least, stop=tuple(stops))
        whole = "".join(chr(script[at % len(script)]) for at in range(max_tokens))
        ends = [end for end in range(least + 1, max_tokens + 1) if any(whole[:end].endswith(stop) for stop in stops)]
        if ends:
            fired = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
            assert (output.text, output.stop_reason) == (whole[: ends[0] - len(fired)], fired)
        else:
            assert (output.text, output.stop_reason) == (whole, None)
