"""`headrace worker` hands its settings on, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import Settings
from worker.main import environment, worker_arguments


def test_the_environment_gives_the_same_settings_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(
        home=tmp_path,
        redis_url="redis://:secret@broker:1/2",
        model={"model_path": "fake:step_s=0.1", "max_num_seqs": 3, "kv_cache_bytes": 4096},
        worker={"lease_s": 2.5},
    )
    for name, value in environment(settings).items():
        monkeypatch.setenv(name, value)
    assert Settings() == settings


def test_extra_arguments_come_last() -> None:
    arguments = worker_arguments(["-n", "gpu0@%h"])
    assert arguments[:5] == ["-A", "worker.app", "worker", "-P", "custom"]
    assert arguments[-2:] == ["-n", "gpu0@%h"]
