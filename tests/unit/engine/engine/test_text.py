"""Tokens that divide characters."""

from __future__ import annotations

import pytest

from tests.unit.engine.bench import make_bench, scripted


class TestText:
    @pytest.mark.in_turn
    def test_characters_are_complete(self) -> None:
        """https://github.com/vllm-project/vllm/issues/8627"""
        bench = make_bench(scripted(list("né🙂".encode())))
        bench.add("a", "p", max_tokens=7)
        seen = [delta.text for _ in range(7) for delta in bench.step().deltas]
        assert seen == ["n", "", "é", "", "", "", "🙂"]

    def test_an_incomplete_character_at_the_end_appears_once(self) -> None:
        """https://github.com/vllm-project/vllm/issues/8627"""
        bench = make_bench(scripted(list("a🙂".encode())))
        assert bench.one("p", max_tokens=4).text == "a\ufffd"

    def test_a_prompt_that_ends_inside_a_character_is_not_shown(self) -> None:
        """https://github.com/vllm-project/vllm/issues/48853"""
        prompt = list("x🙂".encode())[:-2]
        bench = make_bench(scripted([*"🙂".encode()[2:], ord("!")], prompt_tokens=len(prompt)))
        assert bench.one(prompt, max_tokens=3).text == "🙂!"
        assert make_bench(scripted([ord("!")])).one(prompt, max_tokens=3).text == "!!!"
