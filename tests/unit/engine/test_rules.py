"""Penalties, bias, bad words and allowed tokens, each on its own and where they contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fake import END_ID
from engine.grammar import bits
from engine.params import SamplingParams
from engine.rules import TokenRules
from engine.sequence import TokenSequence
from kernels.sampling import Adjustment
from tests.unit.engine.bench import make_bench, scripted

VOCAB = 262


def rules(bad_words: list[list[int]] | None = None, vocab_size: int = VOCAB, **params: Any) -> TokenRules:
    made = TokenRules.of(SamplingParams(**params), vocab_size, bad_words or ())
    assert made is not None
    return made


def allowed_of(adjustment: Adjustment | None) -> set[int]:
    assert adjustment is not None
    assert adjustment.allowed is not None
    mask = int.from_bytes(adjustment.allowed, "little")
    return {token for token in range(8 * len(adjustment.allowed)) if mask >> token & 1}


@given(ids=st.sets(st.integers(0, 5000)), vocab_size=st.integers(5001, 5020))
def test_bits_are_those_of_the_ids(ids: set[int], vocab_size: int) -> None:
    mask = bits(ids, vocab_size)
    assert len(mask) == -(-vocab_size // 8)
    assert int.from_bytes(mask.tobytes(), "little") == sum(1 << token for token in ids)


def test_a_request_without_any_has_none() -> None:
    assert TokenRules.of(SamplingParams(temperature=0.5, top_k=3, seed=1), VOCAB) is None
    assert TokenRules.of(SamplingParams(logit_bias={}), VOCAB) is None


def test_penalties_are_told_with_the_tokens_and_where_the_prompt_ends() -> None:
    tokens = [1, 2, 3]
    adjustment, banned = rules(repetition_penalty=1.5, presence_penalty=0.5).apply(tokens, 2, (), None)
    assert adjustment == Adjustment(tokens=tokens, prompt_tokens=2, repetition=1.5, presence=0.5)
    assert banned == ()


def test_a_bias_needs_no_tokens() -> None:
    adjustment, _ = rules(logit_bias={5: 2, 7: -1.5}).apply([1, 2], 1, (), None)
    assert adjustment == Adjustment(prompt_tokens=1, bias=((5, 2), (7, -1.5)))


class TestBadWords:
    @pytest.mark.parametrize(
        ("output", "banned"),
        [([], (9,)), ([1], (9,)), ([1, 2], (9, 3)), ([2], (9,)), ([1, 2, 3], (9,)), ([1, 1, 2], (9, 3))],
    )
    def test_a_word_is_banned_when_its_other_tokens_have_just_been_produced(
        self, output: list[int], banned: tuple[int, ...]
    ) -> None:
        made = rules([[9], [1, 2, 3]])
        assert made.apply([7, 7, *output], 2, (), None) == (None, banned)

    def test_a_beginning_in_the_prompt_does_not_count(self) -> None:
        assert rules([[1, 2, 3]]).apply([1, 2], 2, (), None) == (None, ())
        assert rules([[1, 2, 3]]).apply([1, 2], 1, (), None) == (None, ())

    def test_they_stand_beside_ends_that_may_not_come_yet(self) -> None:
        assert rules([[9]]).apply([1], 1, (5,), None) == (None, (5, 9))

    @pytest.mark.parametrize("words", [("b",), ("bc",), ("abcd",), ("cab", "d")])
    def test_none_is_ever_generated(self, words: tuple[str, ...]) -> None:
        bench = make_bench(scripted(list(b"abcd")))
        whole = bench.one("p", max_tokens=40, bad_words=words)
        assert len(whole.token_ids) == 40
        assert not any(word in whole.text for word in words)

    def test_a_word_after_a_space_is_the_word_too(self) -> None:
        text = make_bench(scripted(list(b"a b c"))).one("p", max_tokens=20, bad_words=(" b",)).text
        assert "b" not in text

    def test_the_end_of_text_may_be_one(self) -> None:
        output = make_bench(scripted([97, END_ID])).one("p", max_tokens=6, bad_words=("<|end|>",))
        assert (END_ID in output.token_ids, len(output.token_ids)) == (False, 6)


class TestAllowed:
    @given(ids=st.sets(st.integers(0, VOCAB - 1), min_size=1))
    def test_the_mask_has_their_bits(self, ids: set[int]) -> None:
        adjustment, banned = rules(allowed_token_ids=tuple(ids)).apply([1], 1, (), None)
        assert (allowed_of(adjustment), banned) == (ids, ())
        assert len((adjustment or Adjustment()).allowed or b"") == -(-VOCAB // 8)

    def test_nothing_else_is_generated(self) -> None:
        output = make_bench().one("prompt", max_tokens=30, allowed_token_ids=list(b"xyz"), temperature=1.0)
        assert set(output.text) <= set("xyz")

    def test_ends_and_bad_words_narrow_it(self) -> None:
        adjustment, banned = rules([[3]], allowed_token_ids=(2, 3, 4)).apply([1], 1, (4,), None)
        assert (allowed_of(adjustment), banned) == ({2}, ())


class TestContradictions:
    """The stronger holds, and one token at least is always left."""

    @pytest.mark.parametrize(
        ("allowed", "ends", "words", "mask", "left"),
        [
            ((2, 3), (2,), [[3]], None, {3}),  # bad words yield to min_tokens
            ((2,), (), [[2]], None, {2}),  # ... and to the allowed tokens
            ((2, 3), (2, 3), [], None, {2, 3}),  # min_tokens yields to the allowed tokens
            ((2, 3), (), [], {4, 5}, {4, 5}),  # the allowed tokens yield to the grammar
            ((2, 3), (4,), [[5]], {4, 5}, {5}),
            (None, (4,), [[5]], {4, 5, 6}, {6}),
            (None, (4,), [], {4}, {4}),  # the text is complete, whatever min_tokens says
        ],
    )
    def test_where_they_leave_nothing(
        self, allowed: Any, ends: tuple[int, ...], words: list[list[int]], mask: set[int] | None, left: set[int]
    ) -> None:
        made = TokenRules(SamplingParams(allowed_token_ids=allowed), VOCAB, words)
        adjustment, banned = made.apply([1], 1, ends, None if mask is None else bits(mask, VOCAB))
        assert (allowed_of(adjustment), banned) == (left, ())

    def test_bad_words_that_are_the_whole_vocabulary_are_no_ban(self) -> None:
        made = rules([[token] for token in range(8)], vocab_size=8)
        assert made.apply([1], 1, (5,), None) == (None, (5,))

    @given(data=st.data())
    def test_one_token_is_always_left(self, data: st.DataObject) -> None:
        ids = st.integers(0, 7)
        allowed = data.draw(st.none() | st.sets(ids, min_size=1))
        mask = data.draw(st.none() | st.sets(ids, min_size=1))
        words = [[word] for word in data.draw(st.sets(ids))]
        ends = tuple(data.draw(st.sets(ids, max_size=7)))
        made = TokenRules(SamplingParams(allowed_token_ids=allowed and tuple(allowed)), 8, words)
        adjustment, banned = made.apply([1], 1, ends, None if mask is None else bits(mask, 8))
        if allowed is None and mask is None:
            assert (adjustment, len(set(banned)) < 8) == (None, True)
            assert set(ends) <= set(banned)
        else:
            left = allowed_of(adjustment)
            assert left
            assert mask is None or left <= mask
            assert mask is not None or allowed is None or left <= allowed


class TestPenaltiesInTheEngine:
    def test_repetition_counts_the_prompt_and_the_output(self) -> None:
        """https://github.com/vllm-project/vllm-metal/issues/69"""
        params: dict[str, Any] = {"max_tokens": 2, "logit_bias": {98: 0.5 + 98 / 256}}
        bench = make_bench(scripted(list(b"aaa")))
        assert bench.one("xyz", **params).text == "aa"
        assert bench.one("xyz", repetition_penalty=100.0, **params).text == "ab"
        assert bench.one("xaz", repetition_penalty=100.0, **params).text[0] == "b"

    @pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
    def test_presence_and_frequency_count_the_output_only(self, penalty: dict[str, float]) -> None:
        """https://github.com/vllm-project/vllm-metal/issues/69"""
        bench = make_bench(scripted(list(b"a")))
        first = bench.one("aaaa", max_tokens=9, logit_bias={98: 7.5 + 98 / 256}, **penalty).text
        assert first.startswith("ab")
        assert bench.one("aaaa", max_tokens=9, logit_bias={98: 7.5 + 98 / 256}).text == "a" * 9

    def test_penalties_are_the_same_after_a_preemption(self) -> None:
        """https://github.com/vllm-project/vllm/issues/16832"""
        params: dict[str, Any] = {"max_tokens": 24, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
        alone = make_bench().one("prompt", **params).token_ids
        tight = make_bench(pages=12)
        for number in range(4):
            tight.add(str(number), "prompt", **params)
        outputs = tight.run()
        assert tight.engine.stats().preemptions > 0
        assert {output.token_ids for output in outputs.values()} == {alone}

    def test_a_bias_makes_or_unmakes_a_token(self) -> None:
        bench = make_bench(scripted(list(b"ab")))
        assert bench.one("p", max_tokens=4, logit_bias={ord("z"): 100}).text == "zzzz"
        assert bench.one("p", max_tokens=4, logit_bias={ord("a"): -100}).text[1::2] == "bb"


def test_min_tokens_hold_beside_everything_else() -> None:
    """https://github.com/vllm-project/vllm/issues/21987"""
    bench = make_bench(scripted([END_ID]))
    output = bench.one("p", max_tokens=9, min_tokens=4, logit_bias={END_ID: 100}, presence_penalty=-2.0)
    assert END_ID not in output.token_ids[:4]
    assert output.token_ids[4:] == (END_ID,)


def test_a_sequence_without_rules_is_untouched_beside_those_that_have_some() -> None:
    bench = make_bench()
    bench.add("plain", "a prompt", max_tokens=12)
    for number, params in enumerate(
        [{"bad_words": ("z",)}, {"logit_bias": {97: 50}}, {"allowed_token_ids": [98]}, {"frequency_penalty": 2.0}]
    ):
        bench.add(str(number), "a prompt", max_tokens=12, **params)
    outputs = bench.run()
    assert outputs["plain"].text == make_bench().one("a prompt", max_tokens=12).text
    assert len({output.text for output in outputs.values()}) == 4


def test_a_sequence_knows_its_ends_and_its_rules_apart() -> None:
    sequence = TokenSequence("a", [1], prompt_tokens=1, max_len=9, end_ids=(5,), ends_from=2, rules=rules([[9]]))
    assert sequence.banned == (5,)
