"""Jobs with adapters through real workers: beside the base model, refused if there is none, resumed with their own."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.contract import JobStatus, Reason
from headrace.wire import stream_key

from tests.unit.engine.model.random_adapters import save_random_adapter
from tests.unit.engine.model.random_models import greedy_tokens, save_random_model
from tests.workers import WorkerProcess, Workplace, eventually

pytestmark = pytest.mark.slow

FAKE = {"MODEL__ADAPTERS": json.dumps({"sql": "unread", "law": "unread"})}


def test_a_job_with_an_adapter_and_one_without_run_together(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """Of a real model, with torch: each gets the tokens of the model that it asked for."""
    base, path = save_random_model(tmp_path, "Llama")
    merged = save_random_adapter(tmp_path / "lora", base)
    prompt = [5, 9, 33, 70, 12]
    expected = {
        None: greedy_tokens(base, [prompt], 40)[0],
        "mine": greedy_tokens(merged, [prompt], 40)[0],
    }
    assert expected[None] != expected["mine"]
    worker = start_worker(
        MODEL__MODEL_PATH=path,
        MODEL__DTYPE="float32",
        MODEL__DEVICE="cpu",
        MODEL__THREADS=1,
        MODEL__ADAPTERS=json.dumps({"mine": str(tmp_path / "lora")}),
        CACHE=tmp_path / "cache",
    )
    names = [None, "mine"] * 3
    sent = [
        workplace.send(prompt=prompt, max_tokens=40, ignore_eos=True, **({"adapter": name} if name else {}))
        for name in names
    ]
    revisions: dict[Any, set[str | None]] = {None: set(), "mine": set()}
    sizes = []
    for name, result in zip(names, sent, strict=True):
        result.get(timeout=30)
        job = workplace.job(result.id)
        assert job.result is not None
        assert job.timings is not None
        assert job.result.token_ids == expected[name], name
        revisions[name].add(job.timings.model_revision)
        sizes.append(job.timings.max_batch_size or 0)
    assert max(sizes) > 1, "none of them ran beside another"
    ((plain,), (adapted,)) = revisions.values()
    assert str(adapted).startswith(f"{plain}+")
    assert workplace.pool_info(worker)["adapters"] == ["mine"]
    (card,) = workplace.ledger.models().values()
    assert card.adapters == ["mine"]
    assert worker.stop() == 0


def test_an_adapter_that_the_worker_does_not_have_is_refused_with_those_that_it_has(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    start_worker(**FAKE)
    job = workplace.ended(workplace.submit(adapter="medicine").id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error.code is Reason.INVALID_REQUEST
    assert job.error.message == "the model has no adapter 'medicine': it has sql, law"


def test_a_job_goes_on_with_its_adapter_on_another_worker(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess]
) -> None:
    first = start_worker("w1", step_s=0.02, WORKER__LEASE_S=2, **FAKE)
    texts = {name: workplace.ended(workplace.submit(adapter=name, max_tokens=150).id) for name in (None, "sql", "law")}
    job = workplace.submit(adapter="law", max_tokens=150)
    eventually(lambda: workplace.redis.xlen(stream_key(job.id)) > 40, 20, "it has produced a part")
    first.signal(signal.SIGKILL)
    first.wait()
    second = start_worker("w2", step_s=0.02, WORKER__LEASE_S=2, **FAKE)
    ended = workplace.ended(job.id, within_s=30)
    assert ended.result is not None
    results = {name: one.result.text for name, one in texts.items() if one.result is not None}
    assert ended.result.text == results["law"]
    assert len(set(results.values())) == 3
    assert "goes on after" in second.log


def test_a_worker_whose_adapter_does_not_fit_says_so_and_does_not_start(
    workplace: Workplace, start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    _, path = save_random_model(tmp_path / "base", "Llama")
    other, _ = save_random_model(tmp_path / "other", "Llama", hidden_size=96)
    save_random_adapter(tmp_path / "lora", other, ("q_proj",))
    worker = start_worker(
        ready=False,
        MODEL__MODEL_PATH=path,
        MODEL__ADAPTERS=json.dumps({"mine": str(tmp_path / "lora")}),
        CACHE=tmp_path / "cache",
    )
    assert worker.wait() != 0
    assert "adapter 'mine' can't be served: the pair of model.layers.0.self_attn.q_proj has the shapes" in worker.log
