from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.kv import MOST_WASTE, UNIT_BYTES, KVLayout

SMOLLM2 = KVLayout(layers=30, kv_heads=3, head_size=64, element_bytes=2, page_size=16)
LAYOUTS = st.builds(
    KVLayout,
    layers=st.integers(1, 80),
    kv_heads=st.integers(1, 16),
    head_size=st.sampled_from([8, 64, 80, 128, 256]),
    element_bytes=st.sampled_from([1, 2, 4]),
    page_size=st.sampled_from([1, 4, 16, 128]),
)


def test_smollm2_has_eleven_pages_in_four_mebibytes() -> None:
    assert (SMOLLM2.page_bytes // 16, SMOLLM2.extent_bytes, SMOLLM2.pages_per_extent) == (23_040, 4 * 2**20, 11)


@given(layout=LAYOUTS)
def test_an_extent_is_the_smallest_that_wastes_little(layout: KVLayout) -> None:
    def waste(extent_bytes: int) -> float:
        return extent_bytes % layout.page_bytes / extent_bytes

    assert layout.extent_bytes == UNIT_BYTES << layout.extent_order
    assert layout.pages_per_extent >= 1
    assert waste(layout.extent_bytes) <= MOST_WASTE
    if layout.extent_order:
        smaller = layout.extent_bytes // 2
        assert smaller < layout.page_bytes or waste(smaller) > MOST_WASTE


@given(layout=LAYOUTS, first=st.integers(0, 10_000))
def test_pages_follow_each_other_and_none_lies_in_two_extents(layout: KVLayout, first: int) -> None:
    begin, following = layout.offset_bytes(first), layout.offset_bytes(first + 1)
    assert following >= begin + layout.page_bytes
    assert begin // layout.extent_bytes == (begin + layout.page_bytes - 1) // layout.extent_bytes


@given(layout=LAYOUTS, pages=st.integers(0, 10_000))
def test_bytes_and_pages_are_each_others_inverse(layout: KVLayout, pages: int) -> None:
    size = layout.bytes_for(pages)
    assert layout.pages_in(size) == pages
    if size:
        assert layout.pages_in(size - 1) == pages - 1
    units = layout.units_for(pages)
    assert size <= units * UNIT_BYTES < size + layout.extent_bytes


@pytest.mark.parametrize("size", [0, SMOLLM2.page_bytes - 1])
def test_no_page_fits_into_less_than_a_page(size: int) -> None:
    assert SMOLLM2.pages_in(size) == 0
