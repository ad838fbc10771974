"""A worker with a draft model: jobs get what they would have got."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.endurance.random_model import write_random_model
from tests.unit.engine.test_drafting import shallow
from tests.unit.kernels.isas import needs_library
from tests.workers import WorkerProcess, Workplace

pytestmark = [pytest.mark.slow, needs_library]


def test_jobs_get_what_they_would_have_got(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    model = write_random_model(tmp_path / "model")
    draft = shallow(model, tmp_path / "draft", 3)
    settings: dict[str, Any] = {
        "CACHE": tmp_path,
        "MODEL__MODEL_PATH": model,
        "MODEL__DTYPE": "float32",
        "MODEL__MAX_SEQ_LEN": 200,
        "MODEL__DEVICE": "cpu",
    }
    plain = start_worker("w1", **settings, MODEL__NUM_SPECULATIVE_TOKENS=0)
    expected = workplace.answers()
    assert plain.stop() == 0
    drafted = start_worker("w2", **settings, MODEL__SPECULATIVE_MODEL=draft)
    assert workplace.answers() == expected
    assert workplace.pool_info(drafted)["engine"]["drafted_tokens"] > 0
    workplace.ledger.check()


def test_another_vocabulary_is_one_line(start_worker: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model")
    draft = shallow(model, tmp_path / "draft", 3)
    tokenizer = draft / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|tool|>", "<|other|>"))
    worker = start_worker(
        ready=False, CACHE=tmp_path, MODEL__MODEL_PATH=model, MODEL__SPECULATIVE_MODEL=draft, MODEL__DEVICE="cpu"
    )
    assert worker.wait(60) != 0
    assert "speculative_model has another vocabulary: the token '<|other|>'" in worker.log
    assert "Traceback" not in worker.log
