"""The instruction sets that this machine can run, as parameters for tests."""

from __future__ import annotations

import pytest

from kernels.cpu import library


def available() -> tuple[str, ...]:
    """Best first; none where the library was not built."""
    try:
        return library.available()
    except library.Unavailable:
        return ()


def every_isa() -> pytest.MarkDecorator:
    """Run a test once on each instruction set; skip it, visibly, where there is no library."""
    names = available()
    skipped = pytest.param("none", marks=pytest.mark.skip(reason="the CPU library was not built"))
    return pytest.mark.parametrize("isa", names or [skipped])


needs_library = pytest.mark.skipif(not available(), reason="the CPU library was not built")
