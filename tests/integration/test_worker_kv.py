"""A worker that keeps less than all keys and values: its jobs' texts are those of the engine with the same settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.contract import JobStatus

from engine import LLM, KVCompression, SamplingParams
from tests.unit.engine.model.random_models import save_random_model
from tests.workers import WorkerProcess, Workplace

pytestmark = pytest.mark.slow

COMPRESSION = {"ratio": 0.3, "window_tokens": 32}
PROMPTS = [" ".join(f"<{3 + (5 * number + at * at) % 90}>" for at in range(60 + 20 * number)) for number in range(4)]
CONFIG: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": 300}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), "Llama")[1]


@pytest.mark.parametrize("settings", [{"kv_compression": COMPRESSION}, {"kv_cache_dtype": "int8"}], ids=str)
def test_jobs_get_what_the_engine_gives(
    workplace: Workplace,
    start_worker: Callable[..., WorkerProcess],
    path: Path,
    tmp_path: Path,
    settings: dict[str, Any],
) -> None:
    config = {name: KVCompression(**value) if name == "kv_compression" else value for name, value in settings.items()}
    with LLM(path, cache=tmp_path, **CONFIG, **config) as llm:
        wanted = llm.generate(PROMPTS, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    given = {f"MODEL__{name.upper()}": value for name, value in CONFIG.items()}
    for name, value in settings.items():
        if isinstance(value, dict):
            given |= {f"MODEL__{name.upper()}__{part.upper()}": number for part, number in value.items()}
        else:
            given[f"MODEL__{name.upper()}"] = value
    start_worker("w1", ready=False, CACHE=tmp_path, MODEL__MODEL_PATH=path, **given).wait_ready(60)
    ids = [workplace.send(prompt=prompt, max_tokens=60, temperature=0, ignore_eos=True).id for prompt in PROMPTS]
    for job_id, output in zip(ids, wanted, strict=True):
        job = workplace.ended(job_id, 60)
        assert job.status is JobStatus.SUCCEEDED
        assert job.result is not None
        assert job.result.text == output.text


def test_a_ratio_that_is_no_share_is_one_line() -> None:
    command = [sys.executable, "-m", "cli", "worker", "--kv-cache-dtype", "int8", "--kv-compression-ratio", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert "model.kv_compression.ratio" in error
    assert error.endswith("kept can't be 1.5: set it to a number over 0 and at most 1, and to 1 to keep all")
    assert "HEADRACE_MODEL__KV_COMPRESSION__RATIO" in hint
