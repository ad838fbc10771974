"""Every parameter, valid and hostile, at every door: refused with a clear message or it runs, and neighbours go on."""

from __future__ import annotations

import math
from typing import Any

import pytest
from headrace.contract import JobRequest, Reason
from headrace.errors import BadRequest
from headrace.sampling import SamplingFields
from headrace.validation import job_request
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.params import RequestRefused, SamplingParams
from engine.request import FinishReason, RequestOutput
from tests.unit.engine.bench import expected, make_bench, scripted

VOCAB = 262
IDS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.text("ab .🙂", min_size=1, max_size=4), max_size=3)
SCHEMAS = st.sampled_from(
    [
        {"type": "object"},
        {"enum": ["a", 1]},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "x"},
        {"not": {}},
    ]
)

GOOD: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(0, 20),
    "min_tokens": st.integers(0, 20),
    "temperature": st.sampled_from([0, 0.0, 1e-9, 0.7, 100.0]),
    "top_p": st.floats(0, 1),
    "top_k": st.sampled_from([-1, 0, 1, 5, 10**9]),
    "min_p": st.floats(0, 1),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "stop": st.none() | WORDS | st.text("ab", min_size=1, max_size=3),
    "stop_token_ids": st.lists(IDS, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 4),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.none() | st.dictionaries(IDS, st.floats(-100, 100), max_size=4),
    "bad_words": WORDS,
    "allowed_token_ids": st.none() | st.lists(IDS, min_size=1, max_size=5),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "response_format": st.none()
    | st.just({"type": "json_object"})
    | SCHEMAS.map(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}),
    "guided_regex": st.none() | st.sampled_from(["[ab]+", "a{3}", "(", "(a|b)*c", "\\d+"]),
    "guided_choice": st.none() | WORDS.filter(bool),
    "guided_grammar": st.none() | st.sampled_from(['start: "a"', "start: nope", 'start: "a" start | "b"', ""]),
}
HOSTILE: list[Any] = [
    None, True, -1, 0, 2**63, 10**30, 2.5, math.nan, math.inf, -math.inf, 1e300, "", "x", "\ud800", "\x00", b"x",
    [], [""], [-1], [VOCAB], [10**12], [None], ["\ud800"], {}, {"x": 1}, {-1: 1.0}, {VOCAB: 1.0}, {1: math.nan},
    {1: 1e300}, {"type": "json_schema"}, {"type": []}, [[]], object,
]  # fmt: skip


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    """A few parameters, most of them with values of their own kind."""
    names = draw(st.lists(st.sampled_from(sorted(GOOD)), max_size=6, unique=True))
    return {name: draw(GOOD[name] if draw(st.integers(0, 5)) else st.sampled_from(HOSTILE)) for name in names}


def test_no_parameter_is_left_out() -> None:
    assert set(GOOD) == set(SamplingFields.model_fields)


def assert_sound(output: RequestOutput, params: SamplingParams) -> None:
    assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) or "grammar" in (output.error or "")
    assert len(output.choices) == params.n
    for choice in output.choices:
        assert len(choice.token_ids) <= params.max_tokens
        assert all(0 <= token < VOCAB for token in choice.token_ids)
        if params.logprobs is not None:
            assert [told.token_id for told in choice.logprobs or ()] == list(choice.token_ids)
            assert all(math.isfinite(told.logprob) and told.rank >= 1 for told in choice.logprobs or ())
    if params.prompt_logprobs is not None:
        assert len(output.prompt_logprobs or ()) == len(output.prompt_token_ids)


def refuse_or_run(params: dict[str, Any], prompt: str) -> None:
    """Either way the neighbour is undisturbed."""
    bench = make_bench(pages=40, max_num_batched_tokens=9, max_num_seqs=3)
    bench.add("neighbour", "a neighbour", max_tokens=9)
    bench.step()
    try:
        made = SamplingParams(**{"max_tokens": 8, **params})
        bench.add("fuzzed", prompt, **{"max_tokens": 8, "temperature": 1.0, **params})
    except RequestRefused as error:
        refused = error
    else:
        refused = None
    outputs = bench.run()
    assert outputs["neighbour"].token_ids == expected("a neighbour", 9)
    if refused is None:
        assert_sound(outputs["fuzzed"], made)
    else:
        assert (refused.code, refused.param in GOOD, str(refused) != "") == (Reason.INVALID_REQUEST, True, True)


@settings(max_examples=100, deadline=None)
@given(params=parameters(), prompt=st.sampled_from(["ab", "a longer prompt", "<<eos:2>>x"]))
def test_the_engine_refuses_by_name_or_runs(params: dict[str, Any], prompt: str) -> None:
    refuse_or_run(params, prompt)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_no_value_of_any_parameter_does_anything_else(name: str) -> None:
    for value in HOSTILE:
        refuse_or_run({name: value}, "ab")


@settings(max_examples=100, deadline=None)
@given(params=parameters())
def test_what_the_contract_takes_the_engine_understands(params: dict[str, Any]) -> None:
    """A job is never accepted with a value that the engine has no meaning for."""
    try:
        request: JobRequest | None = job_request({"model": "m", "prompt": "x", **params})
    except BadRequest as error:
        request, told = None, error.message
    if request is None:
        assert told
        told.encode()
        return
    given = {name: getattr(request, name) for name in SamplingFields.model_fields}
    SamplingParams(**{name: value for name, value in given.items() if value is not None})
    assert JobRequest.model_validate(request.body()) == request
    assert JobRequest.model_validate(request.body()).fingerprint() == request.fingerprint()


@settings(max_examples=100, deadline=None)
@given(
    script=st.lists(st.sampled_from(["né🙂 ab\n".encode(), b"ab", "🙂".encode()[:2], b"\xff"]), min_size=1, max_size=6),
    stops=st.lists(st.text("ab né🙂\n\ufffd", min_size=1, max_size=4), max_size=3),
    max_tokens=st.integers(1, 40),
    data=st.data(),
)
def test_streamed_text_is_the_final_text(
    script: list[bytes], stops: list[str], max_tokens: int, data: st.DataObject
) -> None:
    """https://github.com/vllm-project/vllm/issues/8627: the bench compares them after every step, too."""
    model = scripted(list(b"".join(script)))
    params: dict[str, Any] = {
        "max_tokens": max_tokens, "stop": tuple(stops), "min_tokens": data.draw(st.integers(0, max_tokens)),
        "include_stop_str_in_output": data.draw(st.booleans()),
    }  # fmt: skip
    bench = make_bench(model)
    bench.add("a", "p", **params)
    streamed = ""
    while bench.engine.has_work:
        streamed += "".join(delta.text for delta in bench.step().deltas)
    output = bench.outputs["a"]
    assert streamed == output.text
    whole = b"".join(bytes([token]) for token in output.token_ids).decode(errors="replace")
    if output.finish_reason is FinishReason.LENGTH:
        assert output.text == whole
    else:
        assert output.stop_reason in stops
        stopped = output.text if params["include_stop_str_in_output"] else output.text + str(output.stop_reason)
        assert stopped.endswith(str(output.stop_reason))
        assert whole.startswith(stopped)
