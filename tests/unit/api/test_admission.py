from __future__ import annotations

import pytest
from headrace.contract import JobRequest, ModelCard
from headrace.errors import BadRequest, NotFound

from api import admission
from api.admission import Admission
from api.threads import LedgerThreads
from ledger import Ledger
from ledger.migrate import upgrade
from tests.integration.api.conftest import byte_bundle
from text.tokenizer import Tokenizer


@pytest.fixture
def ledger(database_url: str) -> Ledger:
    upgrade(database_url)
    return Ledger(database_url)


def register(ledger: Ledger, model: str, revision: str, max_seq_len: int = 8) -> None:
    bundle = byte_bundle()
    card = ModelCard(id=model, revision=revision, max_seq_len=max_seq_len, vocab_size=bundle.vocab_size, chat=True)
    ledger.register_model(card, bundle.to_bytes())


async def test_a_tokenizer_is_made_once_for_each_revision(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counting(Tokenizer):
        def __init__(self, bundle: object) -> None:
            made.append("x")
            super().__init__(byte_bundle())

    monkeypatch.setattr(admission, "Tokenizer", Counting)
    checks = Admission(ledger, LedgerThreads())
    register(ledger, "m", "r1")
    for _ in range(3):
        await checks.check(JobRequest(model="m", prompt="x"))
    assert len(made) == 1
    register(ledger, "m", "r2")
    await checks.cards(fresh=True)
    await checks.check(JobRequest(model="m", prompt="x"))
    assert len(made) == 2
    ledger.close()


async def test_few_tokenizers_are_kept(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "KEPT_TOKENIZERS", 2)
    checks = Admission(ledger, LedgerThreads())
    for name in ("a", "b", "c", "a"):
        register(ledger, name, "r1")
        await checks.check(JobRequest(model=name, prompt="x"))
    assert len(checks._tokenizers) == 2
    ledger.close()


async def test_a_text_to_embed_may_be_as_long_as_the_context_and_costs_its_tokens(ledger: Ledger) -> None:
    """It has no output, whatever `max_tokens` says; a text that is to be continued needs room for a token."""
    register(ledger, "m", "r1", max_seq_len=8)
    checks = Admission(ledger, LedgerThreads())
    assert await checks.check(JobRequest(model="m", prompt="x" * 8, embed=True, n=4)) == 8
    for fields in ({"prompt": "x" * 8}, {"prompt": "x" * 9, "embed": True}):
        with pytest.raises(BadRequest, match="the prompt has"):
            await checks.check(JobRequest.model_validate({"model": "m", **fields}))
    ledger.close()


async def test_an_adapter_that_the_model_is_not_served_with_is_refused_by_name(ledger: Ledger) -> None:
    bundle = byte_bundle()
    card = ModelCard(
        id="m", revision="r1", max_seq_len=8, vocab_size=bundle.vocab_size, chat=True, adapters=["sql", "law"]
    )
    ledger.register_model(card, bundle.to_bytes())
    register(ledger, "plain", "r1")
    checks = Admission(ledger, LedgerThreads())
    assert await checks.check(JobRequest(model="m", prompt="x", adapter="law", max_tokens=3)) == 4
    for model, there in (("m", "it has sql, law"), ("plain", "it is served without any")):
        with pytest.raises(BadRequest, match=f"the model has no adapter 'x': {there}") as refused:
            await checks.check(JobRequest(model=model, prompt="x", adapter="x"))
        assert refused.value.param == "adapter"
    ledger.close()


async def test_without_any_worker_the_message_says_so(ledger: Ledger) -> None:
    with pytest.raises(NotFound, match="no worker has started"):
        await Admission(ledger, LedgerThreads()).check(JobRequest(model="m", prompt="x"))
    ledger.close()
