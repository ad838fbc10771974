from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from engine.batch import build_batch
from engine.fake import END_ID, FakeModel, fake_text, fake_token, is_fake, load_fake
from engine.memory import Page
from engine.scheduler import Chunk
from engine.sequence import TokenSequence
from tests.unit.engine.bench import make_bench
from text.tokenizer import Tokenizer


def sequence(pages: list[int], tokens: list[int]) -> TokenSequence:
    return TokenSequence(
        id="a", tokens=tokens, prompt_tokens=len(tokens), max_len=99, pages=[Page(page) for page in pages]
    )


@pytest.fixture
def model() -> FakeModel:
    model = FakeModel()
    model.allocate_kv(model.kv_layout(4), 1, 1)
    return model


def test_the_next_token_is_a_function_of_the_last_and_its_position(model: FakeModel) -> None:
    [token] = model.execute(build_batch([Chunk(sequence([3, 1], [7, 8, 9, 10, 11]), 0, 5)], 4)).tokens
    assert token == fake_token(11, 5)


def test_text_is_words_of_small_letters() -> None:
    text = make_bench().one("a prompt", max_tokens=200).text
    assert all(char in "abcdefghijklmnopqrstuvwxyz " for char in text)
    assert all(1 <= len(word) <= 5 for word in text.split(" ") if word)
    assert len(set(text.split())) > 20


def test_every_byte_is_its_own_token() -> None:
    tokenizer = Tokenizer(fake_text())
    text = "né 你🙂\n\x00"
    assert tokenizer.encode_prompt(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.vocab_size == 262
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == [259, ord("x"), END_ID, 260]


@pytest.mark.parametrize(("mark", "count"), [("<<eos:3>>", 4), ("<<eos>>", 1), ("<<eos:3>> then", 1)])
def test_a_mark_ends_the_text_so_many_tokens_after_it(mark: str, count: int) -> None:
    output = make_bench().one(mark)
    assert (len(output.token_ids), output.token_ids[-1], output.finish_reason) == (count, END_ID, "stop")


def test_a_mark_raises_so_many_tokens_after_it() -> None:
    output = make_bench().one("<<raise:2>>")
    assert (len(output.token_ids), output.error) == (2, "RuntimeError: the prompt asked for this error")


def test_a_mark_kills_the_process() -> None:
    code = "from engine import LLM; LLM('fake').generate('<<die:2>>')"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9


def test_banned_tokens_are_not_chosen(model: FakeModel) -> None:
    banned = tuple(range(32, 262))
    row = replace(sequence([0], [1]), end_ids=banned, ends_from=9)
    assert model.execute(build_batch([Chunk(row, 0, 1)], 4)).tokens == [0]


def test_a_step_takes_its_time() -> None:
    bench = make_bench(FakeModel(step_s=0.02))
    start = time.monotonic()
    bench.one("p", max_tokens=5)
    assert time.monotonic() - start >= 0.1


class TestPaging:
    """The model finds faults of scheduler and memory."""

    def execute(self, model: FakeModel, row: TokenSequence, start: int, end: int) -> None:
        model.execute(build_batch([Chunk(row, start, end)], 4))

    def test_kv_that_another_request_has_overwritten(self, model: FakeModel) -> None:
        mine, other = sequence([3, 1], [5] * 7), sequence([4, 1], [6] * 7)
        self.execute(model, mine, 0, 6)
        self.execute(model, other, 0, 6)
        with pytest.raises(AssertionError, match="not its own"):
            self.execute(model, mine, 6, 7)

    def test_kv_that_was_never_computed(self, model: FakeModel) -> None:
        row = sequence([3, 1], [5] * 7)
        self.execute(model, row, 0, 3)
        with pytest.raises(AssertionError, match="not its own"):
            self.execute(model, row, 4, 7)

    def test_pages_in_another_order(self, model: FakeModel) -> None:
        row = sequence([3, 1], [1, 2, 3, 4, 5, 6, 7])
        self.execute(model, row, 0, 6)
        row.pages.reverse()
        with pytest.raises(AssertionError):
            self.execute(model, row, 6, 7)

    def test_a_page_outside_the_pool(self, model: FakeModel) -> None:
        with pytest.raises(AssertionError, match="outside the pool"):
            self.execute(model, sequence([1024], [1]), 0, 1)

    def test_two_tokens_in_one_slot(self, model: FakeModel) -> None:
        rows = [sequence([2], [1]), sequence([2], [1])]
        with pytest.raises(AssertionError, match="share a slot"):
            model.execute(build_batch([Chunk(row, 0, 1) for row in rows], 4))

    def test_wrong_positions(self, model: FakeModel) -> None:
        batch = build_batch([Chunk(sequence([2], [1, 2]), 0, 2)], 4)
        with pytest.raises(AssertionError, match="positions"):
            model.execute(replace(batch, positions=[0, 2]))


@pytest.mark.parametrize(
    ("name", "fake"), [("fake", True), ("fake:step_s=1", True), ("fakes", False), ("a/fake", False)]
)
def test_names_that_ask_for_it(name: str, fake: bool) -> None:
    assert is_fake(name) is fake


def test_options_stand_in_the_name() -> None:
    model = load_fake("fake:step_s=0.25,context_len=64")
    assert isinstance(model, FakeModel)
    assert (model.step_s, model.info.context_len) == (0.25, 64)
    with pytest.raises(ValueError, match="no option 'speed'"):
        load_fake("fake:speed=9")
