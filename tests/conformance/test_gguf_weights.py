"""What our reader makes of the demo file is what transformers makes of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.conftest import generate

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def theirs(demo_model: Path) -> Any:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(
            demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32
        ).eval()


def test_every_tensor_is_equal(reference: Any, theirs: Any) -> None:
    ours, expected = reference.state_dict(), theirs.state_dict()
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)


def test_the_configuration_gives_the_same_tokens(reference: Any, theirs: Any) -> None:
    prompt = (504, 3575, 282, 4649, 314)
    assert generate(reference, prompt, 30, (0, 2)) == generate(theirs, prompt, 30, (0, 2))
