"""The models that the door knows."""

from __future__ import annotations

from headrace.contract import ModelCard

from ledger import Ledger

CARD = ModelCard(id="smol", revision="r1", max_seq_len=2048, vocab_size=49152, chat=True)


def test_a_model_is_registered_and_replaced(ledger: Ledger) -> None:
    assert ledger.models() == {}
    assert ledger.text_bundle("smol") is None
    ledger.register_model(CARD, b"\x00one")
    newer = CARD.model_copy(update={"revision": "r2"})
    ledger.register_model(newer, b"two")
    ledger.register_model(CARD.model_copy(update={"id": "a"}), b"three")
    assert list(ledger.models().items()) == [("a", CARD.model_copy(update={"id": "a"})), ("smol", newer)]
    assert ledger.text_bundle("smol") == b"two"
