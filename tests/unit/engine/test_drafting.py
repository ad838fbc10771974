"""Guesses of a draft model: when they pay, what is kept of them, and that they change nothing but the steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.endurance.random_model import write_random_model
from engine import LLM, SamplingParams
from engine.batch import Batch
from engine.compression import KVCompression
from engine.config import EngineConfig
from engine.drafted import DraftedModel
from engine.drafting import PROBE_EVERY
from engine.engine import Engine
from engine.fake import FakeModel, fake_text, fake_token
from engine.model import load_model
from engine.model.catalog import ModelNotFound
from engine.request import EngineRequest
from kernels.sampling import Sampled
from tests.unit.engine.bench import Bench
from tests.unit.engine.test_speculation import FORMS, Said, said
from tests.unit.kernels.isas import needs_library

ALWAYS = "engine.drafting.best_count"


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four drafts of everybody, whatever they cost."""
    monkeypatch.setattr(ALWAYS, lambda *_: 4)


def often_wrong(token: int, at: int) -> int:
    """What the fake model says, but for one place in five."""
    return ord("?") if at % 5 == 3 else fake_token(token, at)


class Slow(FakeModel):
    """Takes a time for each step, by a clock that it moves."""

    def __init__(self, clock: list[float], took_s: float, **options: Any) -> None:
        super().__init__(**options)
        self.clock, self.took_s, self.steps = clock, took_s, 0

    def execute(self, batch: Batch) -> Sampled:
        self.steps += 1
        self.clock[0] += self.took_s
        return super().execute(batch)


def a_bench(
    choose: Any = fake_token, draft_s: float = 0.1, draft: FakeModel | None = None, pages: int = 1000, **config: Any
) -> tuple[Bench, DraftedModel]:
    """An engine whose target takes a second for a step, and its draft model `draft_s`."""
    clock = [0.0]
    target = Slow(clock, 1.0, cheap_rows=4)
    settings: dict[str, Any] = {
        "page_size": 4,
        "kv_cache_bytes": pages * 4 * target.info.kv_bytes_per_token,
        "max_seq_len": min(4096, 4 * pages),
        "warm_up": False,
        **config,
    }
    asked = EngineConfig("fake", **settings)
    model = DraftedModel(target, draft or Slow(clock, draft_s, choose=choose), asked, clock=lambda: clock[0])
    return Bench(Engine(model, asked), target), model


class TestOutput:
    @pytest.mark.parametrize(
        "choose", [fake_token, often_wrong, lambda _token, _at: 0], ids=["right", "often", "wrong"]
    )
    def test_it_is_what_it_would_have_been(self, choose: Any, always: None) -> None:
        plain, _ = a_bench(num_speculative_tokens=4)
        plain.engine._scheduler._drafter = None
        bench, model = a_bench(choose)
        for number in range(6):
            for one in (plain, bench):
                one.add(str(number), "a prompt" * (number + 1), max_tokens=50 + number, n=1 + (number == 2))
        assert {k: v.token_ids for k, v in bench.run().items()} == {k: v.token_ids for k, v in plain.run().items()}
        assert bench.others == plain.others
        assert not model.drafter.failed
        stats = bench.engine.stats()
        assert stats.drafted_tokens > 100
        assert (stats.accepted_tokens > 0.7 * stats.drafted_tokens) == (choose is fake_token)
        if choose is fake_token:
            assert stats.steps < 30

    def test_in_little_memory(self, always: None) -> None:
        """Sequences make way and come back, share prefixes, and pages move: the draft's keys are each one's own."""
        bench, model = a_bench(often_wrong, pages=40, max_seq_len=120, max_num_batched_tokens=24, swap_space_bytes=0)
        for number in range(10):
            bench.add(str(number), f"the same beginning of all prompts {number}", max_tokens=60, n=1 + number % 2)
        outputs = bench.run()
        assert bench.engine.stats().preemptions > 0
        assert bench.engine.stats().cached_tokens > 0
        assert bench.engine.stats().accepted_tokens > 100
        assert not model.drafter.failed
        for number, output in outputs.items():
            alone, _ = a_bench()
            asked = f"the same beginning of all prompts {number}"
            assert alone.one(asked, max_tokens=60).token_ids == output.token_ids

    def test_moved_pages_keep_the_drafts_keys(self, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("engine.residence.MOST_FRAGMENTATION", 0.0)
        monkeypatch.setattr("engine.engine.TIDY_EVERY", 1)
        bench, model = a_bench(pages=3000, max_seq_len=400)
        for number in range(24):
            bench.add(str(number), "x" * (40 + number), max_tokens=10 + 90 * (number % 4 == 0))
        bench.run()
        assert not model.drafter.failed
        stats = bench.engine.stats()
        assert stats.accepted_tokens == stats.drafted_tokens

    def test_through_a_sleep(self, always: None) -> None:
        bench, model = a_bench()
        bench.add("a", "a prompt", max_tokens=60)
        for _ in range(4):
            bench.step()
        bench.engine.sleep()
        bench.engine.wake()
        plain, _ = a_bench()
        assert bench.run()["a"].token_ids == plain.one("a prompt", max_tokens=60).token_ids
        assert not model.drafter.failed

    def test_a_long_prompt_is_computed_in_parts(self, always: None) -> None:
        bench, model = a_bench(max_num_batched_tokens=16)
        seen: list[int] = []
        execute = model._draft.execute
        model._draft.execute = lambda batch: seen.append(len(batch.token_ids)) or execute(batch)  # type: ignore[method-assign,func-returns-value]
        bench.one("p" * 100, max_tokens=40)
        assert max(seen) == 16
        assert sum(seen) < 100 + 2 * 40, "a token is computed once, and again if its draft was wrong"


class TestWhere:
    def test_a_draft_model_that_is_slow_is_hardly_asked(self) -> None:
        bench, model = a_bench(draft_s=1.0)
        bench.one("a prompt", max_tokens=2 * PROBE_EVERY)
        assert bench.engine.stats().drafted_tokens <= 12
        assert model._draft.steps <= 12  # type: ignore[attr-defined]

    def test_one_that_guesses_wrong_is_given_up(self) -> None:
        bench, _ = a_bench(lambda _token, _at: 0)
        bench.one("a prompt", max_tokens=300)
        stats = bench.engine.stats()
        assert stats.steps + stats.accepted_tokens == 300
        assert stats.drafted_tokens < 100

    def test_one_that_is_right_again_is_noticed(self) -> None:
        wrong = [True]
        bench, _ = a_bench(lambda token, at: 0 if wrong[0] else fake_token(token, at))
        bench.one("a prompt", max_tokens=300)
        wrong.clear()
        wrong.append(False)
        before = bench.engine.stats()
        bench.one("a prompt", max_tokens=2500)
        assert bench.engine.stats().steps - before.steps < 2000

    def test_one_that_raises_is_asked_no_more(self) -> None:
        class Broken(FakeModel):
            def execute(self, batch: Batch) -> Sampled:
                raise MemoryError("short")

        bench, model = a_bench(draft=Broken())
        assert len(bench.one("a prompt", max_tokens=30).token_ids) == 30
        assert model.drafter.failed
        assert bench.engine.stats().drafted_tokens == 0

    def test_a_context_that_the_draft_model_lacks(self, always: None) -> None:
        bench, model = a_bench(draft=FakeModel(context_len=60))
        assert len(bench.one("a prompt", max_tokens=200).token_ids) == 200
        assert not model.drafter.failed
        assert 20 < bench.engine.stats().accepted_tokens < 60


class TestRefusals:
    def test_a_model_that_isn_t_there_is_told_before_the_other_is_loaded(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="speculative_model: No model '/nowhere'"):
            load_model(EngineConfig("/nor/this", cache=tmp_path, speculative_model="/nowhere"))

    def test_another_vocabulary(self) -> None:
        text = fake_text()
        other = replace(text, tokenizer_json=text.tokenizer_json.replace("<|tool|>", "<|other|>"))
        with pytest.raises(ValueError, match=r"the token '<\|other\|>' has the id 261 there and None here"):
            DraftedModel(FakeModel(cheap_rows=4), FakeModel(text=other), EngineConfig("fake"))

    def test_a_model_whose_rows_depend_on_each_other(self) -> None:
        with pytest.raises(ValueError, match="drafts would change the output"):
            load_model(EngineConfig("fake", speculative_model="fake"))

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_speculative_tokens": 0},
            {"overlap": True},
            {"tensor_parallel_size": 2},
            {"kv_compression": KVCompression(ratio=0.5)},
        ],
    )
    def test_what_it_can_t_be_had_with(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="speculative_model can't be had with"):
            EngineConfig("fake", speculative_model="fake", **changes)


def shallow(model: Path, directory: Path, layers: int) -> Path:
    """The same model with its first layers alone."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return directory


def told(model: Path, draft: Path | None, crowds: Sequence[Sequence[int]], **form: Any) -> Said:
    prompts = [tuple(3 + i % (3 + n) for i in range(9 + n)) for n in range(12)]
    drafted = {} if draft is None else {"speculative_model": str(draft)}
    return said(4 if draft else 0, crowds, prompts, model=str(model), **drafted, **form)


@needs_library
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_compiled_library_on_both_sides(form: dict[str, Any], tmp_path: Path, always: None) -> None:
    """Greedy and seeded, alone and in a crowd: the tokens are those without guesses."""
    model = write_random_model(tmp_path / "model")
    draft = shallow(model, tmp_path / "draft", 3)
    crowds = ([0], [1], [2], range(3, 12))
    plain, drafted = (told(model, one, crowds, cache=tmp_path, **form) for one in (None, draft))
    assert drafted.tokens == plain.tokens
    assert plain.drafted == 0
    assert drafted.accepted > 20
    assert drafted.drafted - drafted.accepted > 20


@needs_library
def test_llm_has_one_by_its_name(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model")
    config: dict[str, Any] = {"cache": tmp_path, "dtype": "float32", "max_seq_len": 128, "kv_cache_bytes": 2**24}
    params = SamplingParams(max_tokens=40, temperature=0.5, seed=1, ignore_eos=True)
    with LLM(model, **config) as llm:
        expected = llm.generate("Water boils", params)[0].token_ids
    with LLM(model, speculative_model=str(model), **config) as llm:
        assert llm.generate("Water boils", params)[0].token_ids == expected
        stats = llm._engine.stats()
        assert stats.accepted_tokens == stats.drafted_tokens > 0
        llm._engine.add(EngineRequest("x", params, "more"))
        llm._engine.abort_all()
        llm._engine.check()
