"""Engines on threads of their own, over the fake model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.fake import FakeModel
from engine.thread import EngineThread
from tests.unit.engine.thread.recorder import Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make(recorder: Recorder) -> Iterator[Callable[..., EngineThread]]:
    made: list[EngineThread] = []

    def make(model: FakeModel | None = None, **config: Any) -> EngineThread:
        made.append(EngineThread(model or FakeModel(), EngineConfig("fake", **config), recorder))
        made[-1].start()
        return made[-1]

    yield make
    for host in made:
        host.stop()
