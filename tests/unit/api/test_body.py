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


json_texts = st.recursive(
    st.sampled_from(["null", "true", "1", "-0.5e3", "NaN", "1e999", '"x"', '"\\ud800"', "", "tru", "[", "}"]),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda parts: f"[{','.join(parts)}]")
        | st.lists(st.tuples(st.sampled_from(["a", "b"]), inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f'"{name}":{value}' for name, value in pairs) + "}"
        )
    ),
    max_leaves=12,
)


@given(json_texts.map(str.encode) | st.binary(max_size=60))
def test_any_bytes_are_json_or_refused(body: bytes) -> None:
    """And what is taken is JSON to everybody: a strict writer gives it back."""
    try:
        value = parse_json(body)
    except BadRequest:
        return
    assert json.loads(json.dumps(value, allow_nan=False)) == value


def test_a_body_that_is_all_depth_is_refused() -> None:
    for body in (b"[" * 500_000, b'{"a":' * 100_000, b"[" * 50_000 + b"]" * 50_000):
        with pytest.raises(BadRequest):
            parse_json(body)
