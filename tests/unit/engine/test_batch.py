from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.batch import build_batch
from engine.memory import Page
from engine.scheduler import Chunk
from engine.sequence import GREEDY, RowSampling, TokenSequence


def sequence(tokens: list[int], pages: list[int], **fields: object) -> TokenSequence:
    return TokenSequence(
        id="a",
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_len=len(tokens) + 9,
        pages=[Page(page) for page in pages],
        **fields,  # type: ignore[arg-type]
    )


def test_chunks_become_flat_rows() -> None:
    long = sequence([10, 11, 12, 13, 14, 15, 16], [5, 2, 9])
    decode = sequence([20, 21, 22], [7])
    batch = build_batch([Chunk(long, 1, 6), Chunk(decode, 2, 3)], page_size=4)
    assert batch.token_ids == [11, 12, 13, 14, 15, 22]
    assert batch.positions == [1, 2, 3, 4, 5, 2]
    assert batch.slots == [21, 22, 23, 8, 9, 30]
    assert batch.query_start == [0, 5, 6]
    assert batch.context_len == [6, 3]
    assert batch.block_tables == [[5, 2, 9], [7]]
    assert batch.known_tokens == [long.tokens, decode.tokens]
    assert batch.sample_rows == [5]
    assert batch.sampling.position == (3,)


def test_only_chunks_that_reach_the_last_known_token_are_sampled() -> None:
    short_of_it = build_batch([Chunk(sequence([1, 2, 3], [0]), 0, 2)], page_size=4)
    assert short_of_it.sample_rows == []
    assert short_of_it.sampling.seed == ()
    assert build_batch([Chunk(sequence([1, 2, 3], [0]), 0, 3)], page_size=4).sample_rows == [2]


def test_sampling_parameters_stand_in_columns() -> None:
    warm = RowSampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=42)
    rows = [
        sequence([1, 2], [0], sampling=warm, end_ids=(3, 4), ends_from=3),
        sequence([1, 2, 3], [1], sampling=GREEDY, end_ids=(3, 4), ends_from=3),
    ]
    sampling = build_batch([Chunk(row, 0, len(row.tokens)) for row in rows], page_size=4).sampling
    assert sampling.temperature == (0.7, 0.0)
    assert sampling.top_k == (5, 0)
    assert sampling.top_p == (0.9, 1.0)
    assert sampling.min_p == (0.1, 0.0)
    assert sampling.seed == (42, 0)
    assert sampling.position == (2, 3)
    assert sampling.banned == ((3, 4), ())


@given(page_size=st.integers(1, 7), tokens=st.integers(1, 40), data=st.data())
def test_slots_follow_the_block_table(page_size: int, tokens: int, data: st.DataObject) -> None:
    pages = data.draw(st.permutations(range(-(-tokens // page_size))))
    start = data.draw(st.integers(0, tokens - 1))
    end = data.draw(st.integers(start + 1, tokens))
    batch = build_batch([Chunk(sequence(list(range(tokens)), pages), start, end)], page_size)
    assert batch.slots == [pages[at // page_size] * page_size + at % page_size for at in range(start, end)]
    assert batch.positions == batch.token_ids == list(range(start, end))
