"""Paged attention of the CPU library against the formula in float64, and bit by bit against itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.cpu import library, ops
from kernels.cpu.layers import Heads, Numbers
from kernels.cpu.library import Team
from tests.unit.kernels.isas import every_isa
from tests.unit.kernels.paged import FORMS, Pages, from_bytes, loaded, make_step, stored

LAYER = 1
MIXED = [(0, 1), (0, 7), (34, 1), (15, 5), (15, 1), (0, 16), (31, 2), (599, 1), (16, 1), (250, 12), (500, 50)]
"""(computed, new) tokens of each request: decodes, whole prompts, later chunks; around the ends of pages and blocks."""

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


class Case:
    """Requests with random keys and values in their pages, and queries for every token of each."""

    def __init__(self, heads: Heads, lengths: list[int], seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.heads = heads
        self.scale = 1 / np.sqrt(heads.head_size)
        self.pages = Pages(heads, sum(-(-length // heads.page_tokens) for length in lengths) + 3)
        self.tables = [self.pages.take(length) for length in lengths]

        def numbers(length: int, count: int) -> NDArray[Any]:
            return stored(random.standard_normal((length, count, heads.head_size)), heads)

        def kept(length: int) -> NDArray[Any]:
            given = numbers(length, heads.kv_heads)
            return given if heads.numbers is Numbers.PLAIN else loaded(given)

        self.queries = [numbers(length, heads.heads) for length in lengths]
        self.keys = [kept(length) for length in lengths]
        self.values = [kept(length) for length in lengths]
        for i, (table, length) in enumerate(zip(self.tables, lengths, strict=True)):
            self.pages.write(table, LAYER, self.keys[i], self.values[i])
            self.keys[i], self.values[i] = self.pages.read(table, LAYER, 0, length)

    def adopt(self, member: int, other: int, tokens: int) -> None:
        """Let a member's context begin with the pages of another's that hold so many tokens."""
        shared = tokens // self.heads.page_tokens
        self.tables[member][:shared] = self.tables[other][:shared]
        length = len(self.keys[member])
        self.keys[member], self.values[member] = self.pages.read(self.tables[member], LAYER, 0, length)

    def attend(
        self, team: Team, chunks: list[tuple[int, int]], members: list[int] | None = None, **options: Any
    ) -> NDArray[Any]:
        """Attention of the given chunk of each member, all in one step."""
        members = members if members is not None else list(range(len(chunks)))
        step = make_step(chunks, [self.tables[member] for member in members])
        queries = [
            self.queries[member][done : done + rows] for member, (done, rows) in zip(members, chunks, strict=True)
        ]
        offset = LAYER * self.heads.layer_bytes
        return ops.paged_attention(
            team, step, self.heads, np.concatenate(queries), self.pages.arena, self.scale, offset, **options
        )

    def expected(self, chunks: list[tuple[int, int]]) -> NDArray[np.float64]:
        shared, window = self.heads.heads // self.heads.kv_heads, self.heads.window_tokens
        rows = []
        for member, (done, count) in enumerate(chunks):
            q, k, v = (loaded(a[member]).astype(np.float64) for a in (self.queries, self.keys, self.values))
            for position in range(done, done + count):
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                keys, values = (np.repeat(a[seen], shared, axis=1) for a in (k, v))
                scores = np.einsum("hd,thd->ht", q[position], keys) * self.scale
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                rows.append(np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values))
        return np.array(rows)


def assert_near(got: NDArray[Any], expected: NDArray[Any], is_float: bool) -> None:
    tolerance = 2e-5 if is_float else 2e-2
    np.testing.assert_allclose(loaded(got), expected, rtol=tolerance, atol=tolerance)


@every_isa()
@every_form
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (2, 2), (7, 1), (32, 1)])
@pytest.mark.parametrize("size", [6, 64, 80, 128])
def test_a_mixed_batch_equals_the_formula(isa: str, size: int, heads: int, kv_heads: int, form: dict[str, Any]) -> None:
    case = Case(Heads(heads, kv_heads, size, 16, **form), [done + rows for done, rows in MIXED])
    with Team(library.load(isa), 2) as team:
        assert_near(case.attend(team, MIXED), case.expected(MIXED), case.heads.is_float)


@every_isa()
@every_form
@pytest.mark.parametrize("size", [2, 16, 36, 96, 256])
@pytest.mark.parametrize("page_tokens", [32, 48])
def test_other_head_and_page_sizes(isa: str, size: int, page_tokens: int, form: dict[str, Any]) -> None:
    case = Case(Heads(4, 2, size, page_tokens, **form), [done + rows for done, rows in MIXED])
    with Team(library.load(isa), 2) as team:
        assert_near(case.attend(team, MIXED), case.expected(MIXED), case.heads.is_float)


@every_isa()
@every_form
@pytest.mark.parametrize("window", [1, 5, 16, 100, 300])
def test_a_window_hides_what_lies_before_it(isa: str, window: int, form: dict[str, Any]) -> None:
    case = Case(Heads(4, 2, 64, 16, **form, window_tokens=window), [done + rows for done, rows in MIXED])
    with Team(library.load(isa), 2) as team:
        assert_near(case.attend(team, MIXED), case.expected(MIXED), case.heads.is_float)


@every_isa()
@every_form
@pytest.mark.parametrize("window", [None, 270])
def test_a_row_is_bit_equal_in_every_chunk_batch_and_team(isa: str, form: dict[str, Any], window: int | None) -> None:
    """In strict mode greedy output may not change with the chunk size or the batch: vLLM issue 5952."""
    random = np.random.default_rng(3)
    lengths = [1300, 333, 41]
    case = Case(Heads(6, 2, 64, 16, **form, window_tokens=window), lengths)
    with Team(library.load(isa), 1) as alone, Team(library.load(isa), 3) as three:
        whole = [case.attend(alone, [(0, length)], [member]) for member, length in enumerate(lengths)]
        done, parts = [0, 0, 0], [[], [], []]  # type: ignore[var-annotated]
        while any(at < length for at, length in zip(done, lengths, strict=True)):
            members = [m for m in range(3) if done[m] < lengths[m] and random.random() < 0.7]
            if not members:
                continue
            rows = [int(min(random.choice([1, 2, 7, 16, 17, 130, 400]), lengths[m] - done[m])) for m in members]
            out = case.attend(
                three if random.random() < 0.5 else alone,
                [(done[m], n) for m, n in zip(members, rows, strict=True)],
                members,
            )
            for m, n, part in zip(members, rows, np.split(out, np.cumsum(rows)[:-1]), strict=True):
                parts[m].append(part)
                done[m] += n
        for member in range(3):
            np.testing.assert_array_equal(np.concatenate(parts[member]), whole[member])


@every_isa()
@every_form
@pytest.mark.parametrize("page_tokens", [16, 48])
def test_a_prefix_that_requests_share_is_read_once_and_changes_no_bit(
    isa: str, form: dict[str, Any], page_tokens: int
) -> None:
    """Whatever tree their prefixes are: of whole blocks and parts of them, for decodes, drafts and chunks."""
    chunks = [(900, 1), (700, 1), (1100, 2), (520, 1), (512, 3), (300, 1), (2000, 1), (767, 1), (600, 40)]
    chunks += [(256 + i, 1) for i in range(12)]
    case = Case(Heads(6, 2, 64, page_tokens, **form), [done + rows for done, rows in chunks])
    tree = [(1, 0, 512), (2, 0, 768), (3, 1, 256), (4, 0, 100), (6, 2, 1024), (7, 2, 767), (8, 0, 512)]
    for member, other, tokens in tree + [(9 + i, 0, 256) for i in range(12)]:
        case.adopt(member, other, tokens)
    with Team(library.load(isa), 1) as one, Team(library.load(isa), 3) as three:
        together = case.attend(one, chunks)
        np.testing.assert_array_equal(case.attend(three, chunks), together)
        alone = [case.attend(one, [chunk], [member]) for member, chunk in enumerate(chunks)]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    assert_near(together, case.expected(chunks), case.heads.is_float)


@every_isa()
@pytest.mark.parametrize(("page_tokens", "short"), [(512, 300), (1024, 280), (1024, 700)])
def test_requests_may_share_a_page_of_which_they_have_other_numbers_of_blocks(
    isa: str, page_tokens: int, short: int
) -> None:
    """The pages alone don't tell them apart: a short one between two long ones has none of their later blocks."""
    for lengths in ([1100, short, 1100], [1100, short, 1100, short - 20, 1100], [1100, short + 1, short, 1025, 1100]):
        chunks = [(length, 1) for length in lengths]
        case = Case(Heads(6, 2, 64, page_tokens), [length + 1 for length in lengths])
        for member in range(1, len(lengths)):
            case.adopt(member, 0, page_tokens)
        with Team(library.load(isa), 1) as one, Team(library.load(isa), 3) as three:
            together = case.attend(one, chunks)
            np.testing.assert_array_equal(case.attend(three, chunks), together)
            alone = [case.attend(one, [chunk], [member]) for member, chunk in enumerate(chunks)]
        np.testing.assert_array_equal(together, np.concatenate(alone))


@every_isa()
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_one_long_context_is_shared_among_the_threads_and_stays_the_same(isa: str, threads: int) -> None:
    case = Case(Heads(3, 1, 64, 16), [2500])
    with Team(library.load(isa), threads) as team, Team(library.load(isa), 1) as alone:
        for done in (2499, 2303, 2304):
            got = case.attend(team, [(done, 1)])
            np.testing.assert_array_equal(got, case.attend(alone, [(done, 1)]))
            assert_near(got, case.expected([(done, 1)]), False)


@every_isa()
@every_form
def test_what_other_requests_left_behind_the_context_is_never_used(isa: str, form: dict[str, Any]) -> None:
    heads = Heads(6, 2, 80, 16, **form)
    lengths = [1, 15, 16, 17, 31, 257]
    case = Case(heads, lengths)
    chunks = [(length - 1, 1) for length in lengths]
    with Team(library.load(isa), 1) as team:
        before = case.attend(team, chunks)
        nan = np.full((16, heads.kv_heads, heads.head_size), np.nan, np.float32)
        if not heads.is_float and heads.numbers is Numbers.PLAIN:
            nan = np.full(nan.shape, 0x7FC0, np.uint16)
        for table, length in zip(case.tables, lengths, strict=True):
            tail = len(table) * 16 - length
            case.pages.write(table, LAYER, nan[:tail], nan[:tail], first=length)
        np.testing.assert_array_equal(case.attend(team, chunks), before)


@every_isa()
@pytest.mark.parametrize("numbers", [Numbers.INT8, Numbers.E4M3], ids=str)
def test_every_byte_that_may_stand_in_a_page_is_read_as_torch_reads_it(isa: str, numbers: Numbers) -> None:
    """A token with one number in each value, and a key that all others are far from: its value comes out as it is."""
    bytes_ = [byte for byte in range(256) if byte & 0x7F < 0x7F or numbers is Numbers.INT8]
    for is_float in (False, True):
        heads = Heads(1, 1, 256, 16, is_float, numbers=numbers)
        case = Case(heads, [16])
        blocks = case.pages.blocks(case.tables[0][0], LAYER)
        blocks.keys[:], blocks.key_scales[:] = 0, 1
        blocks.values.reshape(1, 8 if not is_float else 16, 256, -1)[:, 0, : len(bytes_), 0] = bytes_
        blocks.value_scales[:] = 0.5
        case.queries[0][:] = stored(np.zeros((16, 1, 256)), heads)
        with Team(library.load(isa), 1) as team:
            got = loaded(case.attend(team, [(0, 1)]))[0, 0, : len(bytes_)]
        expected = from_bytes(np.array([bytes_], np.uint8), np.array([0.5], np.float32), numbers)[0]
        np.testing.assert_array_equal(got, expected)


@every_isa()
@pytest.mark.parametrize("numbers", [Numbers.INT8, Numbers.E4M3], ids=str)
def test_a_token_that_is_no_number_makes_its_own_request_none(isa: str, numbers: Numbers) -> None:
    case = Case(Heads(2, 1, 64, 16, numbers=numbers), [40, 40])
    keys = case.keys[1][20:21].copy()
    keys[0, 0, 3] = np.nan
    with Team(library.load(isa), 2) as team:
        before = case.attend(team, [(39, 1), (39, 1)])
        case.pages.write(case.tables[1], LAYER, keys, case.values[1][20:21], first=20)
        after = case.attend(team, [(39, 1), (39, 1)])
    np.testing.assert_array_equal(after[0], before[0])
    assert np.isnan(loaded(after[1])).all()


@every_isa()
def test_scores_far_beyond_the_exponential_stay_finite(isa: str) -> None:
    case = Case(Heads(2, 1, 64, 16, is_float=True), [600])
    case.scale = 1000.0
    with Team(library.load(isa), 1) as team:
        got = case.attend(team, [(599, 1)])
    best = (case.keys[0][:, 0] @ case.queries[0][599].T).argmax(axis=0)
    np.testing.assert_allclose(got[0], case.values[0][best, 0], rtol=1e-3, atol=1e-3)


@every_isa()
def test_the_result_can_be_float_where_the_rest_is_bf16(isa: str) -> None:
    case = Case(Heads(6, 2, 80, 16), [40])
    with Team(library.load(isa), 1) as team:
        rounded = case.attend(team, [(37, 3)])
        exact = case.attend(team, [(37, 3)], dtype=np.float32)
    assert exact.dtype == np.float32
    np.testing.assert_array_equal(stored(exact, case.heads), rounded)


@every_isa()
def test_what_cannot_be_served_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="9 query heads can't share 2"):
        Heads(9, 2, 64, 16)
    with pytest.raises(ValueError, match="multiple of 16 tokens here, not 24"):
        Heads(9, 3, 64, 24)
    with pytest.raises(ValueError, match="not 7"):
        Heads(9, 3, 7, 16)
    case = Case(Heads(6, 2, 64, 16), [40])
    step = make_step([(39, 1)], case.tables)
    q = case.queries[0][39:]
    short = replace(step, page_offset=step.page_offset[:, :2].copy())
    with Team(library.load(isa), 1) as team:
        with pytest.raises(ValueError, match="outside the arena"):
            ops.paged_attention(team, step, case.heads, q, case.pages.arena[:4096], 1.0)
        with pytest.raises(ValueError, match="more than the 2 pages"):
            ops.paged_attention(team, short, case.heads, q, case.pages.arena, 1.0)
        with pytest.raises(TypeError, match="q has to be uint16"):
            ops.paged_attention(team, step, case.heads, q.astype(np.float32), case.pages.arena, 1.0)
    with pytest.raises(ValueError, match="not the last tokens"):
        replace(step, positions=step.positions - 1)
