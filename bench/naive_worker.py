"""The worker that people write today: Celery as it comes, one job at a time, through `transformers`' `generate`.

Run by the benchmark as: celery -A bench.naive_worker worker --concurrency 1
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery, signals

app = Celery("naive", broker=os.environ["NAIVE_BROKER_URL"], backend=os.environ["NAIVE_BROKER_URL"])
app.conf.broker_connection_retry_on_startup = True
loaded: dict[str, Any] = {}


@signals.worker_process_init.connect  # type: ignore[untyped-decorator]
def load(**_: Any) -> None:
    """Load the model once, in the process that runs the jobs."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_grad_enabled(False)
    directory = os.environ["NAIVE_MODEL"]
    loaded["tokenizer"] = AutoTokenizer.from_pretrained(directory)
    loaded["model"] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]


@app.task(name="naive.about")  # type: ignore[untyped-decorator]
def about() -> dict[str, str | int]:
    """What runs here."""
    import torch
    import transformers

    model = loaded["model"]
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
    }


@app.task(name="naive.generate")  # type: ignore[untyped-decorator]
def generate(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Greedy, exactly `max_tokens` tokens."""
    import torch

    began_s = time.perf_counter()
    ids = torch.tensor([prompt])
    output = loaded["model"].generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=loaded["tokenizer"].pad_token_id or 0,
    )
    new = output[0, len(prompt) :].tolist()
    return {"text": loaded["tokenizer"].decode(new), "tokens": len(new), "seconds": time.perf_counter() - began_s}
