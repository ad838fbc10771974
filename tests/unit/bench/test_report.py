"""The report says what was measured, in medians and with its spread."""

from __future__ import annotations

import json
from pathlib import Path

from bench.report import Report, Round

REPORT = Report(
    rounds=[
        Round("naive", 2, 300, 256, 10.0),
        Round("headrace", 64, 9000, 8192, 8.0, (60.0, 62.0)),
        Round("naive", 2, 300, 256, 8.0),
        Round("headrace", 64, 9000, 8192, 16.0, (64.0,)),
        Round("naive", 2, 300, 256, 4.0),
        Round("headrace", 64, 9000, 8192, 4.0, (58.0,)),
    ],
    jobs=64,
    max_tokens=128,
    setting={"machine": "a machine"},
    sides={"naive": {"dtype": "bfloat16"}, "headrace": {"dtype": "auto"}},
)


def test_the_ratio_is_that_of_the_medians() -> None:
    assert REPORT.rates("naive") == [25.6, 32.0, 64.0]
    assert REPORT.rates("headrace") == [1024.0, 512.0, 2048.0]
    assert REPORT.ratio == 32.0


def test_what_is_written_names_the_numbers_and_the_settings(tmp_path: Path) -> None:
    REPORT.write(tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    assert "**32.0 times the throughput**: 1024 against 32 tokens a second" in page
    assert "| Celery and `transformers`, one job at a time | 32.0 | 25.6 | 64.0 | 256.0 s | 3 |" in page
    assert "| Headrace | 1024.0 | 512.0 | 2048.0 | 8.0 s | 3 |" in page
    assert "batches of 61 on average (largest 64)" in page
    assert "| naive | dtype bfloat16 |" in page
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["ratio"] == 32.0
    assert numbers["median_tokens_per_second"] == {"naive": 32.0, "headrace": 1024.0}
    assert len(numbers["rounds"]) == 6
