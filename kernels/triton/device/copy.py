"""Whole pages, from one place of the arena to another."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_kernel(arena, source, target, words, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Program (n, b): BLOCK words of 4 bytes of page n; offsets count in UNIT words. No target is a source as well."""
    page = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < words
    begin = tl.load(source + page).to(tl.int64) * UNIT
    end = tl.load(target + page).to(tl.int64) * UNIT
    tl.store(arena + end + i, tl.load(arena + begin + i, mask=inside), mask=inside)
