"""A worker whose weights are in 8 or 4 bits: its jobs' texts are those of weights that were rounded before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headrace.contract import JobStatus

from engine import LLM, SamplingParams
from kernels.weights import Bits
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.engine.model.rounded_models import save_rounded
from tests.workers import WorkerProcess, Workplace

pytestmark = pytest.mark.slow

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
PROMPTS = [" ".join(f"<{3 + (5 * number + at * at) % 90}>" for at in range(4 + 9 * number)) for number in range(3)]
CONFIG: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": 100, "kernels": "torch"}


@pytest.mark.parametrize(("quantization", "bits", "ranks"), [("int8", 8, 1), ("int4", 4, 1), ("int4", 4, 2)])
def test_jobs_get_what_rounded_weights_give(
    workplace: Workplace,
    start_worker: Callable[..., WorkerProcess],
    tmp_path: Path,
    quantization: str,
    bits: Bits,
    ranks: int,
) -> None:
    path = save_random_model(tmp_path, "Llama", **SIZES, head_dim=32)[1]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with LLM(save_rounded(path, bits), tmp_path, **CONFIG) as llm:
        wanted = [output.text for output in llm.generate(PROMPTS, params)]
    given = {f"MODEL__{name.upper()}": value for name, value in CONFIG.items()}
    given |= {"MODEL__QUANTIZATION": quantization, "MODEL__TENSOR_PARALLEL_SIZE": ranks}
    worker = start_worker(ready=False, CACHE=tmp_path, MODEL__MODEL_PATH=path, **given).wait_ready(60)
    assert f" in {quantization}, revision" in worker.log
    ids = [workplace.send(prompt=prompt, max_tokens=30, temperature=0, ignore_eos=True).id for prompt in PROMPTS]
    jobs = [workplace.ended(job_id, 60) for job_id in ids]
    assert {job.status for job in jobs} == {JobStatus.SUCCEEDED}
    assert [job.result.text for job in jobs if job.result] == wanted


def test_widths_that_fit_no_group_are_one_line(start_worker: Callable[..., WorkerProcess], tmp_path: Path) -> None:
    path = save_random_model(tmp_path, "Llama")[1]
    worker = start_worker(
        ready=False, CACHE=tmp_path, MODEL__MODEL_PATH=path, MODEL__QUANTIZATION="int4", MODEL__DEVICE="cpu"
    )
    assert worker.wait(60) != 0
    assert "quantization='int4' takes inputs in groups of 64, and the model's hidden size is 48" in worker.log
    assert "Traceback" not in worker.log
