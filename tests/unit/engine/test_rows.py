"""Which rows of a step give tokens, and with which parameters."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.params import SamplingParams
from engine.rows import Rows
from engine.rules import TokenRules
from engine.scheduler import Chunk
from engine.sequence import RowSampling, TokenSequence

WARM = RowSampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=42)


def sequence(tokens: int, prompt: int | None = None, **fields: Any) -> TokenSequence:
    prompt = tokens if prompt is None else prompt
    return TokenSequence("a", list(range(tokens)), prompt, max_len=fields.pop("max_len", tokens + 9), **fields)


def rows_of(*chunks: Chunk) -> Rows:
    rows, first = Rows(), 0
    for chunk in chunks:
        rows.add(chunk, first)
        first += chunk.end - chunk.start
    return rows


def test_a_plain_batch_says_nothing_of_what_it_has_not() -> None:
    sampling = rows_of(Chunk(sequence(3, sampling=WARM), 2, 3), Chunk(sequence(5), 0, 5)).sampling()
    assert (sampling.adjust, sampling.forced, sampling.logprobs) == (None, None, None)
    assert (sampling.temperature, sampling.seed, sampling.position) == ((0.7, 0.0), (42, 0), (3, 5))


def test_no_rows() -> None:
    rows = rows_of(Chunk(sequence(5), 0, 3))
    assert (rows.flat, rows.sampling().seed) == ([], ())


def test_a_scored_prompt_has_a_row_for_each_token_but_the_first() -> None:
    scored = sequence(5, sampling=WARM, prompt_logprobs=3, logprobs=1)
    rows = rows_of(Chunk(sequence(9), 8, 9), Chunk(scored, 0, 5))
    sampling = rows.sampling()
    assert rows.flat == [0, 1, 2, 3, 4, 5]
    assert sampling.forced == (-1, 1, 2, 3, 4, -1)
    assert sampling.position == (9, 1, 2, 3, 4, 5)
    assert sampling.logprobs == (-1, 3, 3, 3, 3, 1)
    assert sampling.temperature == (0.0, 0.0, 0.0, 0.0, 0.0, 0.7), "a scored row draws nothing"


def test_a_chunk_scores_the_token_behind_it_too() -> None:
    scored = sequence(6, prompt_logprobs=0)
    assert rows_of(Chunk(scored, 0, 2)).sampling().forced == (1, 2)
    scored.scored = 3
    assert rows_of(Chunk(scored, 2, 4)).sampling().forced == (3, 4)


def test_what_was_scored_before_a_preemption_is_not_scored_again() -> None:
    scored = sequence(6, prompt_logprobs=0, scored=4)
    rows = rows_of(Chunk(scored, 0, 6))
    assert (rows.flat, rows.sampling().forced) == ([3, 4, 5], (4, 5, -1))
    assert rows_of(Chunk(scored, 0, 3)).flat == []


def test_nothing_comes_after_a_prompt_that_is_only_scored() -> None:
    scored = sequence(4, max_len=4, prompt_logprobs=0)
    assert rows_of(Chunk(scored, 0, 4)).sampling().forced == (1, 2, 3)
    scored.computed, scored.scored = 4, 4
    assert scored.complete
    assert not scored.needs_nothing
    assert sequence(4, max_len=4).needs_nothing


def test_rules_hold_for_sampled_rows_alone() -> None:
    rules = TokenRules.of(SamplingParams(presence_penalty=1.0), 20, [[7]])
    ruled = sequence(3, prompt_logprobs=0, rules=rules, end_ids=(5,), ends_from=9)
    sampling = rows_of(Chunk(ruled, 0, 3), Chunk(sequence(2, end_ids=(5,), ends_from=9), 1, 2)).sampling()
    assert sampling.adjust is not None
    assert [one is not None for one in sampling.adjust] == [False, False, True, False]
    assert sampling.banned == ((), (), (5, 7), (5,))


@given(prompt=st.integers(1, 30), output=st.integers(0, 5), cuts=st.lists(st.integers(1, 34)), data=st.data())
def test_every_prompt_token_is_scored_once_however_the_work_is_cut(
    prompt: int, output: int, cuts: list[int], data: st.DataObject
) -> None:
    scored = sequence(prompt + output, prompt=prompt, prompt_logprobs=0)
    total, seen = prompt + output, []
    ends = [*sorted({cut for cut in cuts if cut < total}), total]
    again = data.draw(st.integers(0, len(ends)))
    for turn in (ends[:again], ends):
        start = 0
        for end in turn:
            found = scored.unscored(start, end)
            seen += found
            scored.scored += len(found)
            start = end
    assert seen == list(range(1, prompt))
