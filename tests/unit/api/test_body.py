from __future__ import annotations

import json

import pytest
from headrace.errors import BadRequest
from hypothesis import given
from hypothesis import strategies as st

from api.body import parse_json

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


@given(values, st.booleans())
def test_every_json_value_is_read_as_it_is(value: object, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_a_refusal(body: bytes) -> None:
    refused: BadRequest | None = None
    try:
        parse_json(body)
    except BadRequest as error:
        refused = error
    assert refused is None or (refused.status, refused.code) == (400, "invalid_json")


@given(values, st.data())
def test_a_body_that_ends_early_is_refused(value: object, data: st.DataObject) -> None:
    body = json.dumps({"a": value}).encode()
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(BadRequest):
        parse_json(body[:cut])
