"""Real weights in little memory: whatever happens to pages and weights while requests run, no token depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.cpu.model import CpuModel
from engine.engine import Engine
from engine.memory import Move
from engine.request import EngineRequest, SamplingParams
from engine.runner import TorchModel
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.kernels.isas import needs_library

pytestmark = pytest.mark.slow

Kind = type[TorchModel] | type[CpuModel]
Tokens = dict[str, tuple[int, ...]]

LARGE_KV = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
"""Eight pages in float32 fill an extent."""
MANY, FEW = 128, 24
"""Pages for all requests at once, and for the largest one with some others."""
COMMON = tuple(3 + i % 31 for i in range(40))


@dataclass
class Story:
    """What happens to an engine, and what must have come of it."""

    pages: int = MANY
    config: dict[str, Any] = field(default_factory=dict)
    before_step: Callable[[Engine, int], None] = lambda _engine, _step: None
    came_true: Callable[[Engine, int], bool] = lambda _engine, _moves: True
    """By the engine and the pages that were moved."""


def sleep_and_wake(engine: Engine, step: int) -> None:
    if step % 12 == 5:
        engine.sleep()
        engine.wake()


def resize(engine: Engine, step: int) -> None:
    if step in (6, 14, 22):
        pages = {6: FEW, 14: MANY, 22: FEW}[step]
        engine.set_kv_bytes(engine._memory.storage.layout.bytes_for(pages))


def always_swap(engine: Engine, step: int) -> None:
    engine._scheduler.running.preemption.compute_tokens_per_s = 1.0


def preempted(engine: Engine, _moves: int) -> bool:
    return engine.stats().preemptions > 0


def swapped(engine: Engine, _moves: int) -> bool:
    return engine.stats().swaps > 0


STORIES = {
    "computed again": Story(FEW, {"swap_space_bytes": 0}, came_true=preempted),
    "swapped": Story(FEW, {"swap_space_bytes": 2**28}, always_swap, swapped),
    "swapped and moved": Story(FEW + 8, {"swap_space_bytes": 2**28, "tidy": 1}, always_swap, swapped),
    "moved": Story(config={"tidy": 1}, came_true=lambda _engine, moves: moves > 4),
    "asleep now and then": Story(before_step=sleep_and_wake, came_true=preempted),
    "resized": Story(before_step=resize, came_true=lambda engine, _moves: engine.stats().pages_total == FEW),
    "in chunks of 7": Story(config={"max_num_batched_tokens": 7}),
    "without a cache": Story(FEW, {"enable_prefix_caching": False}, came_true=preempted),
    "one at a time": Story(config={"max_num_seqs": 1}),
}


def requests() -> Iterator[EngineRequest]:
    """Prompts of 4 to 85 tokens, some with a beginning in common; outputs end at different steps."""
    for number in range(12):
        own = tuple(5 + (number * 7 + i * i) % 90 for i in range(4 + 9 * (number % 6)))
        how: dict[str, Any] = {"temperature": 0.0} if number % 3 else {"temperature": 0.9, "seed": number}
        params = SamplingParams(max_tokens=40 + 5 * (number % 5), ignore_eos=True, **how)
        yield EngineRequest(str(number), params, (COMMON if number % 2 else ()) + own)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), "Llama", **LARGE_KV)[1]


@pytest.fixture(scope="module", params=[TorchModel, pytest.param(CpuModel, marks=needs_library)])
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


def tell(kind: Kind, path: Path, cache: Path, story: Story, monkeypatch: pytest.MonkeyPatch) -> Tokens:
    """Let a story happen; the tokens of each request."""
    config = {
        "dtype": "float32",
        "device": "cpu",
        "max_seq_len": 160,
        "memory_margin": 0.0,
        "warm_up": False,
        **story.config,
    }
    if config.pop("tidy", None):
        monkeypatch.setattr("engine.residence.MOST_FRAGMENTATION", 0.0)
        monkeypatch.setattr("engine.engine.TIDY_EVERY", 1)
    model = kind.load(EngineConfig(str(path), cache=cache, **config))
    kv_bytes = model.kv_layout(16).bytes_for(story.pages)
    engine = Engine(model, EngineConfig(str(path), cache=cache, kv_cache_bytes=kv_bytes, **config))
    moved: list[Move] = []
    copy_pages = engine._memory.storage.copy_pages

    def counted(moves: Sequence[Move]) -> None:
        moved.extend(moves)
        copy_pages(moves)

    monkeypatch.setattr(engine._memory.storage, "copy_pages", counted)
    for request in requests():
        engine.add(request)
    tokens: Tokens = {}
    step = 0
    while engine.has_work:
        story.before_step(engine, step)
        for output in engine.step().finished:
            assert output.error is None
            tokens[output.request_id] = output.token_ids
        engine.check()
        step += 1
    assert story.came_true(engine, len(moved)), engine.stats()
    assert engine.stats().pages_free == engine.stats().pages_total
    engine.close()
    return tokens


@pytest.fixture(scope="module")
def undisturbed(kind: Kind, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return tell(kind, path, tmp_path_factory.mktemp("cache"), Story(), monkeypatch)


@pytest.mark.parametrize("name", STORIES)
def test_no_token_depends_on_it(
    kind: Kind, path: Path, undisturbed: Tokens, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/vllm-project/vllm/issues/16832, https://github.com/vllm-project/vllm/issues/5952"""
    assert len({tokens[:8] for tokens in undisturbed.values()}) > 8, "hardly any two differ: they would prove little"
    assert tell(kind, path, tmp_path, STORIES[name], monkeypatch) == undisturbed
