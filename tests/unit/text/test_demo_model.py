from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.model import load_text
from text.bundle import TextBundle
from text.detokenizer import Detokenizer
from text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Tokenizer:
    """The demo model's tokenizer, as the door gets it: through the bundle's bytes."""
    bundle, _, _ = load_text(EngineConfig(str(demo_model)))
    return Tokenizer(TextBundle.from_bytes(bundle.to_bytes()))


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_streamed_text_joined_is_the_full_decode(demo: Tokenizer, text: str) -> None:
    ids = demo.encode_prompt(text)
    detokenizer = Detokenizer(demo)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == demo.decode(ids)


@given(data=st.data())
def test_any_token_ids_give_what_a_full_decode_gives(demo: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, demo.vocab_size - 1), max_size=40))
    detokenizer = Detokenizer(demo)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == demo.decode(ids)


def test_a_chat_is_templated_with_single_special_tokens(demo: Tokenizer) -> None:
    ids = demo.encode_chat([{"role": "user", "content": "hi"}])
    start = demo.token_to_id("<|im_start|>")
    assert [token_id for token_id in ids if token_id == start] == [start] * 3
    assert demo.decode(ids, skip_special_tokens=False).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert demo.eos_token_ids
