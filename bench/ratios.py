"""What is compared with what, and how much better Headrace has to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two medians of one part. It always says how many times better Headrace is: over 1 is better."""

    key: str
    what: str
    part: str
    metric: str
    ours: tuple[str, ...]
    """Sides of Headrace; the best one counts."""
    theirs: str
    at_least: float
    higher_is_better: bool = True


RATIOS = (
    Ratio(
        "w1_bf16_vs_vllm", "W1, bf16, tokens a second, to vLLM",
        "w1", "tokens_per_s", ("headrace-bf16",), "vllm-bf16", 1.5,
    ),
    Ratio(
        "w1_int8_vs_vllm", "W1, int8, tokens a second, to vLLM in bf16",
        "w1", "tokens_per_s", ("headrace-int8",), "vllm-bf16", 2.0,
    ),
    Ratio(
        "w1_bf16_vs_llamacpp", "W1, bf16, tokens a second, to llama.cpp in bf16",
        "w1", "tokens_per_s", ("headrace-bf16",), "llamacpp-bf16", 2.5,
    ),
    Ratio(
        "w2_bf16_vs_vllm", "W2 (shared prefix), bf16, tokens a second, to vLLM",
        "w2", "tokens_per_s", ("headrace-bf16",), "vllm-bf16", 1.6,
    ),
    Ratio(
        "w3_bf16_vs_vllm", "W3 (one request), bf16, time for each token, to vLLM",
        "w3", "ms_per_token", ("headrace-bf16",), "vllm-bf16", 1.9, higher_is_better=False,
    ),
    Ratio(
        "w3_best_vs_llamacpp_q4_0", "W3, int8 or 4 bit, time for each token, to llama.cpp in Q4_0",
        "w3", "ms_per_token", ("headrace-int8", "headrace-gguf"), "llamacpp-q4_0-single", 1.5, higher_is_better=False,
    ),
    Ratio(
        "start_vs_vllm", "from the start of the process to the first token, to vLLM",
        "start", "first_token_s", ("headrace-bf16",), "vllm-bf16", 10.0, higher_is_better=False,
    ),
    Ratio(
        "memory_vs_vllm", "peak of the resident memory in W1, to vLLM",
        "w1", "peak_bytes", ("headrace-bf16",), "vllm-bf16", 3.0, higher_is_better=False,
    ),
    Ratio(
        "w1_jobs_vs_engine", "W1 as Celery jobs through the whole of Headrace, tokens a second, to the engine alone",
        "jobs", "tokens_per_s", ("jobs",), "engine", 0.95,
    ),
    Ratio(
        "itl_p99_capped_vs_uncapped", "p99 between two tokens while long prompts arrive, to the same without the cap",
        "stall", "itl_p99_ms", ("headrace-bf16-capped",), "headrace-bf16-uncapped", 2.5, higher_is_better=False,
    ),
    Ratio(
        "noop_jobs_vs_celery_threads", "no-op jobs a second, to Celery with its thread pool and database results",
        "noop", "jobs_per_s", ("headrace-noop",), "celery-noop", 1.0,
    ),
    Ratio(
        "jobs_vs_naive_worker", "jobs through Celery, tokens a second, to the worker that people write today",
        "naive", "tokens_per_s", ("headrace",), "naive", 1.0,
    ),
)  # fmt: skip


def times_better(ratio: Ratio, ours: float, theirs: float) -> float:
    return ours / theirs if ratio.higher_is_better else theirs / ours


@dataclass(frozen=True, slots=True)
class Bound:
    """A number of Headrace's own that is to stay on one side of a limit, whatever others do."""

    key: str
    what: str
    part: str
    metric: str
    ours: tuple[str, ...]
    """Sides of Headrace; the best one counts."""
    limit: float
    higher_is_better: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.higher_is_better else value <= self.limit


BOUNDS = (
    Bound(
        "ledger_cost", "W1 as jobs: share of the time that the ledger's threads take a processor",
        "jobs", "ledger_share", ("jobs",), 0.02,
    ),
    Bound(
        "noop_jobs_per_s", "no-op jobs a second: submitted, claimed, committed, acknowledged",
        "noop", "jobs_per_s", ("headrace-noop", "headrace-noop-two"), 1500.0, higher_is_better=True,
    ),
    Bound(
        "cancel_p99_ms", "from a request to cancel to the job's end while 64 run, p99: a step and 50 ms",
        "cancel", "p99_ms", ("headrace-cancel",), 70.0,
    ),
)  # fmt: skip
