"""A signature holds for its own message, its own key and its own time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from headrace.contract import JobRequest, job_kwargs
from headrace.signing import LIFE_S, BadSignature, check, sign
from headrace.wire import TASK_GENERATE
from hypothesis import given
from hypothesis import strategies as st

KEY, OTHER = "a key of the producers", "another key, not theirs"
NOW_S = 1_760_000_000.0
KWARGS = {"model": "m", "prompt": "Grüße\u2028\U0001f600", "temperature": 0.1, "max_tokens": 7}


def verify(
    signature: object, kwargs: Any = KWARGS, task_id: str = "j1", task: str = TASK_GENERATE, **more: Any
) -> None:
    check(more.get("keys", [KEY]), signature, task, task_id, kwargs, more.get("now_s", NOW_S))


def test_a_signed_message_is_taken() -> None:
    verify(sign(KEY, "j1", KWARGS, NOW_S))
    verify(sign(OTHER, "j1", KWARGS, NOW_S), keys=[KEY, OTHER])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kwargs": {**KWARGS, "max_tokens": 8}}, "not that of this message"),
        ({"kwargs": {**KWARGS, "extra": None}}, "not that of this message"),
        ({"kwargs": {"job_id": "j1"}}, "not that of this message"),
        ({"kwargs": {**KWARGS, "model": {1, 2}}}, "can't be signed"),
        ({"kwargs": {**KWARGS, "temperature": float("nan")}}, "can't be signed"),
        ({"task_id": "j2"}, "not that of this message"),
        ({"task": "headrace.embed"}, "not that of this message"),
        ({"keys": [OTHER]}, "not that of this message"),
        ({"now_s": NOW_S + LIFE_S + 1}, "days ago"),
        ({"now_s": NOW_S - 600}, "in the future"),
    ],
)
def test_whatever_is_changed_breaks_it(change: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSignature, match=says):
        verify(sign(KEY, "j1", KWARGS, NOW_S), **change)


@pytest.mark.parametrize("signature", ["", "t=1", "v1=" + "0" * 64, "t=1760000000,v1=" + "0" * 63, 17, ["t=1"], b"x",
                                       "t=1760000000,v1=" + "G" * 64, "t=-1,v1=" + "0" * 64])  # fmt: skip
def test_what_is_no_signature_is_told(signature: object) -> None:
    with pytest.raises(BadSignature, match="is no signature"):
        verify(signature)
    with pytest.raises(BadSignature, match="is not signed"):
        verify(None)


def test_a_message_that_names_a_job_of_the_ledger_may_be_old() -> None:
    """It may wait on the queue for as long as no worker runs, and starts only what the ledger has queued."""
    verify(sign(KEY, "j1", {"job_id": "j1"}, NOW_S), {"job_id": "j1"}, now_s=NOW_S + 100 * LIFE_S)


@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
        ),
    )
)
def test_it_holds_over_the_brokers_json(kwargs: dict[str, Any]) -> None:
    """Keys that are numbers, tuples, the order of names and the form of floats don't matter."""
    received = json.loads(json.dumps(dict(reversed(kwargs.items())), indent=1))
    verify(sign(KEY, "j1", kwargs, NOW_S), received)


def test_a_request_as_the_producer_sends_it() -> None:
    request = JobRequest(model="m", prompt="x", logit_bias={10: 1.0, 9: -1.5}, metadata={"b": "1", "a": "2"})
    kwargs = job_kwargs(request)
    verify(sign(KEY, "j1", kwargs, NOW_S), json.loads(json.dumps(kwargs)))


def test_the_documented_recipe_makes_the_same_signature() -> None:
    text = (Path(__file__).parents[3] / "docs/security.md").read_text()
    [recipe] = re.findall(r"```python\n(import hashlib.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(recipe, scope)
    check([KEY], scope["signature"](KEY, "j1", KWARGS), TASK_GENERATE, "j1", KWARGS, __import__("time").time())
