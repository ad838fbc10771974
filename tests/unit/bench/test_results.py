"""What is recorded stays, ratios are those of medians of one run, and the page says what the numbers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.parts.cancel import ALLOWED_MS
from bench.ratios import BOUNDS, RATIOS, Bound
from bench.results import Part, Results, SideResult

FACTS: dict[str, Any] = {"versions": {"engine": "1"}, "settings": {"dtype": "bf16"}, "precision": "bf16"}
LIMITS = {
    "threads": 2, "read_bytes_per_s": 78e9, "read_one_thread_bytes_per_s": 40e9,
    "bf16_ops_per_s": 860e9, "int8_ops_per_s": 1857e9,
}  # fmt: skip
SHAPE = {"layers": 30, "hidden": 576, "inner": 1536, "vocab": 49152, "q_width": 576, "kv_width": 192}
WORK = {"prompt_tokens": [128] * 64, "shared_tokens": 0, "max_tokens": 128}


def throughput(**rates: list[float]) -> Part:
    """A part W1 with the rates of sides; `_` stands for `-` in their names."""
    part = Part({"machine": {"machine": "a machine"}, "limits": LIMITS, "shape": SHAPE, "work": WORK})
    for name, values in rates.items():
        samples = [{"tokens_per_s": rate, "seconds": 8192 / rate, "peak_bytes": 1e9} for rate in values]
        part.sides[name.replace("_", "-")] = SideResult(f"Side {name}", FACTS | {"prompts": 64}, samples)
    return part


def latency(**ms: list[float]) -> Part:
    part = Part({"limits": LIMITS, "shape": SHAPE, "work": WORK | {"prompt_tokens": [128]}})
    for name, values in ms.items():
        samples = [{"ms_per_token": value, "first_token_ms": 20.0} for value in values]
        part.sides[name.replace("_", "-")] = SideResult(name, FACTS | {"weights_bytes": 269e6}, samples)
    return part


def read(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return found


def test_a_ratio_has_both_medians_the_spread_the_versions_and_the_settings(tmp_path: Path) -> None:
    Results(tmp_path).record("w1", throughput(headrace_bf16=[1200, 1000, 1100], vllm_bf16=[800, 900, 1000]))
    entry = read(tmp_path)["w1_bf16_vs_vllm"]
    assert entry["ratio"] == round(1100 / 900, 3)
    assert entry["round_ratios"] == [1.5, 1.111, 1.1]
    for role, side, middle, lowest, highest in (
        ("headrace", "headrace-bf16", 1100, 1000, 1200),
        ("peer", "vllm-bf16", 900, 800, 1000),
    ):
        found = entry[role]
        assert (found["side"], found["median"], found["lowest"], found["highest"]) == (side, middle, lowest, highest)
        assert found["versions"] == {"engine": "1"}
        assert found["settings"] == {"dtype": "bf16"}
    assert "memory_vs_vllm" in read(tmp_path)
    assert "w1_int8_vs_vllm" not in read(tmp_path), "a side that was not measured has no ratio"


def test_of_times_the_shorter_is_better_and_the_best_of_several_sides_counts(tmp_path: Path) -> None:
    part = latency(headrace_int8=[3.0], headrace_gguf=[2.0], headrace_bf16=[4.0])
    part.sides["llamacpp-q4_0-single"] = SideResult("llama.cpp", FACTS | {"weights_bytes": 9e7}, [
        {"ms_per_token": 5.0, "first_token_ms": 60.0}
    ])  # fmt: skip
    Results(tmp_path).record("w3", part)
    entry = read(tmp_path)["w3_best_vs_llamacpp_q4_0"]
    assert entry["ratio"] == 2.5
    assert entry["headrace"]["side"] == "headrace-gguf"


def test_what_is_not_measured_again_stays(tmp_path: Path) -> None:
    Results(tmp_path).record("w1", throughput(headrace_bf16=[1200], vllm_bf16=[800]))
    Results(tmp_path).record("w3", latency(headrace_bf16=[4.0], vllm_bf16=[10.0]))
    Results(tmp_path).record("w1", throughput(headrace_bf16=[1600]))
    found = read(tmp_path)
    assert found["w1_bf16_vs_vllm"]["ratio"] == 1.5, "a ratio is of two sides of one run"
    assert found["w3_bf16_vs_vllm"]["ratio"] == 2.5
    sides = found["parts"]["w1"]["sides"]
    assert sides["headrace-bf16"]["samples"][0]["tokens_per_s"] == 1600
    assert sides["vllm-bf16"]["samples"][0]["tokens_per_s"] == 800
    assert sides["headrace-bf16"]["run"] != sides["vllm-bf16"]["run"]


def test_a_side_that_failed_between_rounds_is_compared_over_what_it_did(tmp_path: Path) -> None:
    Results(tmp_path).record("w1", throughput(headrace_bf16=[1200, 1000, 1100], vllm_bf16=[800]))
    assert read(tmp_path)["w1_bf16_vs_vllm"]["rounds"] == 1


def test_the_page_names_what_was_missed_and_the_share_of_the_limits(tmp_path: Path) -> None:
    Results(tmp_path).record("w1", throughput(headrace_bf16=[1000, 1000], vllm_bf16=[800, 1000]))
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| W1, bf16, tokens a second, to vLLM | 1000 tokens/s | 900 tokens/s | **1.11** | 1.00 to 1.25 |" in text
    assert "1.5 (missed)" in text
    assert "| Side headrace_bf16 | 1000 | 1000 to 1000 | 8.2 | 6" in text
    assert "computed 860 bf16 and 1857 int8 Gop/s" in text
    assert "`vllm-bf16`" in text


def test_what_a_smaller_kv_costs_is_on_the_page(tmp_path: Path) -> None:
    sample = {"perplexity": 17.05, "agreement": 0.97, "logprob_error": 0.021, "needles": 0.75, "kept": 0.4}
    part = Part(
        {"needles": 20, "needle_tokens": 1000, "tokens": 2211}, {"kv-half": SideResult("half", FACTS, [sample])}
    )
    Results(tmp_path).record("kv", part)
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| half | 40% | 17.05 | 97.0% | 0.021 | 75% |" in text
    assert "2211 tokens of a fixed text, and 20 texts of 1000 tokens" in text


@pytest.mark.parametrize("ratio", RATIOS, ids=lambda ratio: ratio.key)
def test_every_ratio_can_be_shown(ratio: Any, tmp_path: Path) -> None:
    sample = {
        ratio.metric: 2.0, "tokens_per_s": 2.0, "seconds": 3.0, "peak_bytes": 1e9, "ms_per_token": 2.0, "loaded_s": 1.0,
        "first_token_ms": 2.0, "first_token_s": 2.0, "submitted_s": 0.1, "mean_batch": 60.0, "itl_p50_ms": 1.0,
        "itl_p99_ms": 2.0, "itl_max_ms": 3.0, "long_first_token_ms": 9.0, "ledger_cpu_s": 0.1, "ledger_share": 0.01,
    }  # fmt: skip
    facts = FACTS | {"prompts": 64, "weights_bytes": 1e8}
    names = {*ratio.ours, ratio.theirs}
    part = Part({
        "limits": LIMITS, "shape": SHAPE, "work": WORK, "prompt_tokens": 128, "jobs": 64, "naive_jobs": 4,
        "max_tokens": 128, "steady": 16, "long_prompts": 8, "long_prompt_tokens": 1536,
    }, {name: SideResult(name, facts, [sample]) for name in names})  # fmt: skip
    Results(tmp_path).record(ratio.part, part)
    assert ratio.what in (tmp_path / "RESULTS.md").read_text()
    assert read(tmp_path)[ratio.key]["ratio"] == 1.0


FACTS_OF_PARTS: dict[str, dict[str, Any]] = {
    "jobs": {"jobs": 64, "max_tokens": 128},
    "noop": {"jobs": 3000},
    "cancel": {"cancels": 200, "running": 64, "allowed_ms": ALLOWED_MS},
}


def bounded(bound: Bound, **sides: list[float]) -> Part:
    """The part that a bound is of, with such values of its metric; `_` stands for `-` in the names of sides."""
    rest = {
        "tokens_per_s": 700.0, "seconds": 11.0, "submitted_s": 0.1, "mean_batch": 50.0, "ledger_cpu_s": 0.1,
        "p50_ms": 40.0, "max_ms": 90.0,
    }  # fmt: skip
    part = Part({"machine": {"machine": "a machine"}} | FACTS_OF_PARTS[bound.part])
    for name, values in sides.items():
        part.sides[name.replace("_", "-")] = SideResult(name, FACTS, [rest | {bound.metric: each} for each in values])
    return part


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.key)
def test_a_bound_is_on_record_and_on_the_page_held_or_missed(bound: Bound, tmp_path: Path) -> None:
    good, bad = (2.0, 0.5) if bound.higher_is_better else (0.5, 2.0)
    for factor, missed in ((good, False), (bad, True)):
        values = [bound.limit * factor * spread for spread in (0.9, 1.0, 1.1)]
        Results(tmp_path).record(bound.part, bounded(bound, **{bound.ours[0].replace("-", "_"): values}))
        entry = read(tmp_path)[bound.key]
        assert (entry["value"], entry["lowest"], entry["highest"]) == (values[1], values[0], values[2])
        assert entry["at_least" if bound.higher_is_better else "at_most"] == bound.limit
        assert (entry["round_values"], entry["settings"]) == (values, {"dtype": "bf16"})
        page = (tmp_path / "RESULTS.md").read_text().splitlines()
        [line] = [line for line in page if line.startswith(f"| {bound.what}")]
        assert ("(missed)" in line) == missed


def test_the_best_side_is_held_to_a_bound_and_a_step_more_is_part_of_it(tmp_path: Path) -> None:
    bounds = {bound.key: bound for bound in BOUNDS}
    noop = bounds["noop_jobs_per_s"]
    Results(tmp_path).record("noop", bounded(noop, headrace_noop=[1200.0], headrace_noop_two=[2000.0]))
    assert (read(tmp_path)[noop.key]["side"], read(tmp_path)[noop.key]["value"]) == ("headrace-noop-two", 2000.0)
    assert bounds["cancel_p99_ms"].limit == ALLOWED_MS
