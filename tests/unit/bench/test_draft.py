"""The benchmark of drafts, in small."""

from __future__ import annotations

import pytest

from bench import draft
from tests.unit.kernels.isas import needs_library


@needs_library
@pytest.mark.slow
def test_it_compares_the_output_and_prints_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draft, "MAX_TOKENS", 24)
    arguments = ["draft", "--layers", "2", "--draft-layers", "1", "--damping", "0", "--requests", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    draft.main()
    title, line = capsys.readouterr().out.splitlines()
    assert title.split()[0] == "damping"
    assert line.split()[:2] == ["0", "2"]
