"""What the demo model still finds with less of its keys and values: floors under what was measured, 5, 5, 5 and 2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.compression import KVCompression
from engine.config import EngineConfig
from engine.quality.needle import Needle, found, needles

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]
COUNT = 6


@pytest.fixture(scope="module")
def config(demo_model: Path) -> EngineConfig:
    return EngineConfig(str(demo_model), device="cpu", dtype="float32", max_seq_len=800, max_num_seqs=COUNT)


@pytest.fixture(scope="module")
def asked(config: EngineConfig) -> list[Needle]:
    return needles(config, 700, COUNT)


def test_the_texts_are_what_they_should_be(asked: list[Needle]) -> None:
    assert [len(needle.prompt) for needle in asked] == [700] * COUNT
    assert len({needle.answer for needle in asked}) == COUNT
    assert [needle.depth for needle in asked] == sorted(needle.depth for needle in asked)


@pytest.mark.parametrize(
    ("form", "least"),
    [
        ({}, 4),
        ({"kv_cache_dtype": "int8"}, 4),
        ({"kv_cache_dtype": "fp8"}, 4),
        ({"kv_compression": KVCompression(0.5)}, 1),
    ],
    ids=["full", "int8", "fp8", "half"],
)
def test_a_number_in_a_long_text_is_found(
    config: EngineConfig, asked: list[Needle], form: dict[str, Any], least: int
) -> None:
    assert sum(found(replace(config, **form), asked)) >= least
