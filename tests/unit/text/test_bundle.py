from __future__ import annotations

from dataclasses import replace

from text.bundle import TextBundle


def test_bytes_bring_back_an_equal_bundle(byte_level_bundle: TextBundle) -> None:
    bundle = replace(byte_level_bundle, chat_template=None, eos_token_ids=(1, 3))
    assert TextBundle.from_bytes(bundle.to_bytes()) == bundle


def test_equal_bundles_give_equal_bytes(byte_level_bundle: TextBundle) -> None:
    assert replace(byte_level_bundle).to_bytes() == byte_level_bundle.to_bytes()
    assert replace(byte_level_bundle, add_bos=False).to_bytes() != byte_level_bundle.to_bytes()


def test_bytes_are_smaller_than_the_tokenizer(byte_level_bundle: TextBundle) -> None:
    assert len(byte_level_bundle.to_bytes()) < len(byte_level_bundle.tokenizer_json.encode()) / 2
