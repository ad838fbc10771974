"""Constrained decoding through the whole engine: what comes out parses, whatever else is asked for."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from engine import grammar as module
from engine.fake import END_ID, FakeModel
from engine.grammar import KEPT_GRAMMARS, GrammarFailed, Grammars, Mask, masks
from engine.params import RequestRefused
from engine.request import FinishReason
from tests.unit.engine.bench import Bench, make_bench, scripted
from text.grammar import Grammar, GrammarError, Kind
from text.tokenizer import Tokenizer

VOCAB = 262
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FakeModel().info.text)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB)


def allowed(mask: Mask | None) -> set[int]:
    assert mask is not None
    assert len(mask) == -(-VOCAB // 8)
    return {token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1}


class TestMatcher:
    def test_allows_what_may_come_and_ends_where_the_text_may_end(self, grammars: Grammars) -> None:
        matcher = grammars.matcher(Grammar(Kind.REGEX, "ab?"), (END_ID, 7))
        seen = []
        for token in b"ab":
            seen.append(allowed(masks([matcher])[0]))
            matcher.accept(token)
        assert seen == [{ord("a")}, {ord("b"), END_ID, 7}]
        assert matcher.finished

    def test_an_end_of_text_that_is_no_end_here_is_never_allowed(self, grammars: Grammars) -> None:
        """`ignore_eos`: only the stop ids of the user end the text."""
        matcher = grammars.matcher(Grammar(Kind.REGEX, "a+"), (ord("!"),))
        matcher.accept(ord("a"))
        assert allowed(masks([matcher])[0]) == {ord("a"), ord("!")}

    def test_several_stand_each_in_its_own_place(self, grammars: Grammars) -> None:
        grammar = Grammar(Kind.REGEX, "abc")
        first, second = (grammars.matcher(grammar, ()) for _ in range(2))
        first.accept(ord("a"))
        assert [allowed(mask) for mask in masks([first, second])] == [{ord("b")}, {ord("a")}]
        before, found, after = masks([None, second, None])
        assert (before, allowed(found), after) == (None, {ord("a")}, None)
        assert masks([None, None]) == [None, None]

    def test_a_token_that_is_not_allowed_is_an_error(self, grammars: Grammars) -> None:
        matcher = grammars.matcher(Grammar(Kind.REGEX, "ab"), ())
        with pytest.raises(GrammarFailed, match="can't be followed"):
            matcher.accept(ord("x"))
        assert not matcher.finished

    def test_a_grammar_without_a_next_token_is_an_error(self, grammars: Grammars) -> None:
        matcher = grammars.matcher(Grammar(Kind.REGEX, "a*"), ())
        matcher.accept(ord("a"))
        assert allowed(masks([matcher])[0]) == {ord("a")}
        empty = grammars.matcher(Grammar(Kind.LARK, 'start: ""'), ())
        with pytest.raises(GrammarFailed, match="no token follows"):
            masks([empty])

    @pytest.mark.parametrize(
        ("text", "parses"),
        [('{"a": 1}', True), ('{"a": "né🙂"}', True), ('{"a": 1', False), ("", False), ("[]", False)],
    )
    def test_whole_texts_are_judged(self, grammars: Grammars, text: str, parses: bool) -> None:
        matcher = grammars.matcher(Grammar(Kind.JSON, '{"type":"object"}'), (END_ID,))
        matcher.accept(ord("{"))
        assert matcher.parses(text) is parses

    def test_a_vocabulary_that_ends_inside_a_byte_has_no_bit_behind_it(self, tokenizer: Tokenizer) -> None:
        for size in (257, 258, 261, 262):
            matcher = Grammars(tokenizer, size).matcher(Grammar(Kind.REGEX, "[^b]*"), (256,))
            [mask] = masks([matcher])
            assert mask is not None
            assert len(mask) == 33
            assert 256 in {256 + bit for bit in range(8) if mask[32] >> bit & 1} <= {256}

    def test_a_grammar_too_large_for_its_first_step_is_refused(
        self, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LIMITS", LLParserLimits(step_max_items=1))
        with pytest.raises(GrammarError, match="Too many items"):
            grammars.matcher(Grammar(Kind.LARK, 'start: a b\na: "x"? "y"?\nb: "z"? a?'), ())

    def test_a_text_that_grows_past_the_limits_fails_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LIMITS", LLParserLimits(max_items_in_row=9))
        bench = make_bench(scripted([97]))
        bench.add("deep", "p", guided_grammar='start: "a" start "b"? | "a" start "c"? | "a"', max_tokens=30)
        bench.add("other", "p", max_tokens=30)
        outputs = bench.run()
        assert (outputs["deep"].error or "").startswith("the grammar can't be followed any further: Parser Error")
        assert outputs["other"].finish_reason is FinishReason.LENGTH


class TestCache:
    def test_a_grammar_is_compiled_once(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        own = Grammars(tokenizer, VOCAB)
        compiled = self.count(monkeypatch)
        for _ in range(3):
            own.matcher(Grammar(Kind.REGEX, "a"), ())
        assert compiled == ["a"]

    def test_few_are_kept(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        own = Grammars(tokenizer, VOCAB)
        compiled = self.count(monkeypatch)
        for number in range(KEPT_GRAMMARS + 1):
            own.matcher(Grammar(Kind.REGEX, f"a{number}"), ())
            own.matcher(Grammar(Kind.REGEX, "a0"), ())
        assert len(compiled) == KEPT_GRAMMARS + 1
        own.matcher(Grammar(Kind.REGEX, "a1"), ())
        assert compiled[-1] == "a1"

    def count(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        compiled: list[str] = []
        form = Grammar.form

        def counting(grammar: Grammar) -> str:
            if not compiled or compiled[-1] != grammar.source:
                compiled.append(grammar.source)
            return form(grammar)

        monkeypatch.setattr(Grammar, "form", counting)
        return compiled

    def test_threads_may_share_them(self, tokenizer: Tokenizer) -> None:
        own, found = Grammars(tokenizer, VOCAB), []

        def run(number: int) -> None:
            matcher = own.matcher(Grammar(Kind.REGEX, f"{number % 3}"), ())
            found.append((number % 3, allowed(masks([matcher])[0])))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 12
        assert all(tokens == {ord(str(number))} for number, tokens in found)


class TestOutputs:
    @pytest.mark.parametrize("seed", range(3))
    def test_a_schema(self, seed: int) -> None:
        output = make_bench().one(f"prompt {seed}", max_tokens=600, response_format=schema_of(PERSON))
        jsonschema.validate(json.loads(output.text), PERSON)
        assert output.finish_reason is FinishReason.STOP

    def test_any_object(self) -> None:
        output = make_bench(scripted(list(b'{"a":[1,true,null]}'))).one(
            "p", response_format={"type": "json_object"}, max_tokens=60
        )
        assert (json.loads(output.text), output.finish_reason) == ({"a": [1, True, None]}, FinishReason.STOP)

    def test_a_regex(self) -> None:
        output = make_bench().one("p", guided_regex="[0-9]{3}-[x-z]{2}")
        assert re.fullmatch("[0-9]{3}-[x-z]{2}", output.text)

    @pytest.mark.parametrize(
        "choices",
        [
            ("yes", "no"),
            ('say "hi"\n', "naïve 🙂"),
            ("a", "ab"),
            ("\x00\x1f\x7f\u2028\\",),
            tuple(f"choice {i}" for i in range(3000)),
        ],
        ids=["plain", "quoted", "prefix", "control", "many"],
    )
    def test_a_choice(self, choices: tuple[str, ...]) -> None:
        output = make_bench().one("p", guided_choice=choices, max_tokens=30)
        assert output.text in choices

    @pytest.mark.parametrize(
        "params", [{"guided_choice": ["<|end|>"]}, {"response_format": schema_of({"const": "<|end|>"})}]
    )
    def test_the_name_of_a_special_token_is_text_like_any_other(self, params: dict[str, Any]) -> None:
        output = make_bench().one("p", **params, max_tokens=30)
        assert (output.text.strip('"'), output.finish_reason) == ("<|end|>", FinishReason.STOP)

    def test_a_lark_grammar(self) -> None:
        grammar = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,2}/'
        output = make_bench(scripted(list(b"12+3+456")), pages=50).one("p", guided_grammar=grammar, max_tokens=7)
        assert re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2})*", output.text)

    def test_a_text_ends_by_itself_when_nothing_can_follow(self) -> None:
        output = make_bench().one("p", guided_regex="abc", ignore_eos=True)
        assert (output.text, output.finish_reason, output.token_ids) == ("abc", FinishReason.STOP, tuple(b"abc"))

    def test_the_models_own_end_is_taken_where_the_text_may_end(self) -> None:
        bench = make_bench(scripted([*b"aa", END_ID, *b"bb"]))
        assert bench.one("p", guided_regex="a+b?").text == "aa"
        assert bench.one("p", guided_regex="aa+c", max_tokens=5).text != "aa"

    def test_every_seed_follows(self) -> None:
        output = make_bench().one("p", guided_choice=("abc", "xyz"), n=4, temperature=1.0, seed=3)
        assert {choice.text for choice in output.choices} <= {"abc", "xyz"}
        assert {choice.finish_reason for choice in output.choices} == {FinishReason.STOP}


class TestBesideOtherParameters:
    def test_a_length_cuts_and_what_is_there_is_a_beginning(self) -> None:
        output = make_bench().one("p", guided_regex="[a-z]{9}!", max_tokens=4)
        assert (output.finish_reason, bool(re.fullmatch("[a-z]{4}", output.text))) == (FinishReason.LENGTH, True)

    def test_a_complete_text_ends_before_min_tokens(self) -> None:
        assert make_bench().one("p", guided_regex="ab", min_tokens=6, max_tokens=9).text == "ab"

    def test_min_tokens_hold_as_long_as_the_grammar_goes_on(self) -> None:
        bench = make_bench(scripted([97, END_ID]))
        output = bench.one("p", guided_regex="a+", min_tokens=5, max_tokens=9)
        assert (output.text, output.finish_reason) == ("aaaaa", FinishReason.STOP)

    def test_a_stop_string_fires_only_where_the_text_parses(self) -> None:
        script = list(b'{"a":{"b":1}}')
        schema = schema_of({"type": "object"})
        bench = make_bench(scripted(script))
        assert json.loads(bench.one("p", response_format=schema, stop="}", max_tokens=30).text) == {"a": {"b": 1}}
        included = bench.one("p", response_format=schema, stop="}", include_stop_str_in_output=True, max_tokens=30)
        assert (json.loads(included.text), included.stop_reason) == ({"a": {"b": 1}}, "}")

    def test_a_stop_string_behind_a_complete_text_cuts_it_there(self) -> None:
        bench = make_bench(scripted(list(b"abab.cd")))
        output = bench.one("p", guided_regex=r"[a-d]+(\.[a-d]*)?", stop=".", max_tokens=20)
        assert (output.text, output.stop_reason) == ("abab", ".")

    def test_a_stop_id_ends_only_a_complete_text(self) -> None:
        bench = make_bench(scripted(list(b"ab1b")))
        output = bench.one("p", guided_regex="ab[0-9]b?", stop_token_ids=(ord("b"),), max_tokens=9)
        assert (output.text, output.token_ids, output.stop_reason) == ("ab1", tuple(b"ab1b"), ord("b"))

    def test_a_stop_id_that_the_grammar_cannot_do_without_is_text(self) -> None:
        """Of parameters that leave no token between them the grammar is the strongest: it ended with an error."""
        for ignore_eos in (False, True):
            output = make_bench().one("p", guided_choice=("red",), stop_token_ids=tuple(b"red"), ignore_eos=ignore_eos)
            assert (output.text, output.finish_reason, output.stop_reason) == ("red", FinishReason.STOP, None)

    def test_bad_words_and_allowed_tokens_never_break_it(self) -> None:
        bench = make_bench()
        assert bench.one("p", guided_choice=("no", "nay"), bad_words=("n", "no")).text in ("no", "nay")
        assert bench.one("p", guided_choice=("no", "nay"), allowed_token_ids=list(b"xyz")).text in ("no", "nay")
        assert bench.one("p", guided_choice=("no", "nay"), logit_bias={ord("a"): 100}).text == "nay"

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_whatever_is_asked_for_beside_it_the_text_parses(self, data: st.DataObject) -> None:
        letters = st.sampled_from(list("ab01,[]"))
        words = st.lists(st.text(letters, min_size=1, max_size=3), max_size=3)
        script = data.draw(st.lists(st.sampled_from([*b"ab01,[]", END_ID]), min_size=1, max_size=12))
        least = data.draw(st.integers(0, 30))
        output = make_bench(scripted(script)).one(
            "p",
            guided_grammar='start: list\nlist: "[" (item ("," item)*)? "]"\nitem: /[ab01]+/ | list',
            max_tokens=60,
            min_tokens=least,
            stop=tuple(data.draw(words)),
            bad_words=tuple(data.draw(words)),
            include_stop_str_in_output=data.draw(st.booleans()),
            ignore_eos=data.draw(st.booleans()),
            repetition_penalty=data.draw(st.sampled_from([0.5, 1.0, 2.0])),
        )
        assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if output.finish_reason is FinishReason.STOP:
            assert isinstance(json.loads(re.sub("[ab01]+", "1", output.text)), list)


class TestOnItsWay:
    PARAMS: dict[str, Any] = {"response_format": schema_of(PERSON), "max_tokens": 600}  # noqa: RUF012

    @pytest.mark.parametrize("pages", [1000, 200])
    def test_a_preempted_request_goes_on_where_it_was(self, pages: int) -> None:
        """https://github.com/vllm-project/vllm/issues/16832"""
        alone = [make_bench().one(f"prompt {n}", **self.PARAMS).text for n in range(4)]
        bench = make_bench(pages=pages)
        for number in range(4):
            bench.add(str(number), f"prompt {number}", **self.PARAMS)
        outputs = bench.run()
        assert (bench.engine.stats().preemptions > 0) == (pages < 1000)
        assert [outputs[str(n)].text for n in range(4)] == alone

    def test_neighbours_without_a_grammar_are_untouched(self) -> None:
        bench = make_bench()
        bench.add("json", "prompt", **self.PARAMS)
        bench.add("free", "prompt", max_tokens=40)
        outputs = bench.run()
        assert outputs["free"].text == make_bench().one("prompt", max_tokens=40).text
        jsonschema.validate(json.loads(outputs["json"].text), PERSON)

    def test_a_step_that_is_tried_again_moves_no_matcher(self) -> None:
        class Flaky(FakeModel):
            calls = 0

            def execute(self, batch):  # type: ignore[no-untyped-def]
                self.calls += 1
                if self.calls % 2:
                    raise RuntimeError("not now")
                return super().execute(batch)

        bench = make_bench(Flaky())
        for number in range(2):
            bench.add(str(number), "prompt", guided_regex="[a-z]{8}")
        assert {len(output.text) for output in bench.run().values()} <= {0, 8}

    @pytest.mark.parametrize("broken", [{"guided_regex": "("}, {"guided_grammar": "start: nope"}])
    def test_a_bad_grammar_is_refused_and_neighbours_go_on(self, broken: dict[str, str]) -> None:
        bench: Bench = make_bench()
        bench.add("good", "prompt")
        bench.step()
        with pytest.raises(RequestRefused) as refused:
            bench.add("bad", "prompt", **broken)
        assert refused.value.param in broken
        assert list(bench.run()) == ["good"]
