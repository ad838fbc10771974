from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.budget import Demand, NoRoom, resized, solve
from engine.memory.machine import DeviceMemory
from kernels.kv import KVLayout

GiB = 2**30
SMOLLM2 = KVLayout(layers=30, kv_heads=3, head_size=64, element_bytes=2, page_size=16)
DEMAND = Demand(utilization=0.85, kv_bytes=None, default_kv_bytes=GiB, context_tokens=4096, margin=0.2)
CONTEXT_BYTES = SMOLLM2.bytes_for(256)


def test_a_host_gives_what_was_asked_for_or_the_default() -> None:
    memory = DeviceMemory(16 * GiB, GiB)
    assert solve(DEMAND, memory, 0, SMOLLM2).pages == 256 * 11
    budget = solve(replace(DEMAND, kv_bytes=2 * GiB), memory, 10**8, SMOLLM2)
    assert (budget.kv_bytes, budget.pages, budget.activation_bytes) == (2 * GiB, 512 * 11, 10**8)


def test_a_device_gives_all_that_weights_and_activations_leave() -> None:
    memory = DeviceMemory(80 * GiB, 20 * GiB)
    budget = solve(replace(DEMAND, default_kv_bytes=None), memory, 3 * GiB, SMOLLM2)
    assert budget.kv_bytes == int(0.85 * 80 * GiB) - 23 * GiB
    assert str(budget).startswith(
        "69632 MiB usable = 20480 used (weights and the rest) + 3072 activations + 46080 left"
    )


def test_the_default_grows_to_one_request_of_the_context_length() -> None:
    budget = solve(replace(DEMAND, context_tokens=100_000), DeviceMemory(16 * GiB, 0), 0, SMOLLM2)
    assert budget.pages == 6250


def test_no_more_is_taken_than_the_machine_has_left() -> None:
    memory = DeviceMemory(GiB, GiB // 2)
    for kv_bytes in (None, 50 * GiB):
        budget = solve(replace(DEMAND, kv_bytes=kv_bytes), memory, 10**7, SMOLLM2)
        assert budget.kv_bytes == int(0.85 * GiB) - GiB // 2 - 10**7


def test_admission_keeps_the_margin_and_still_admits_one_request_of_the_context_length() -> None:
    budget = solve(DEMAND, DeviceMemory(16 * GiB, 0), 0, SMOLLM2)
    assert budget.watermark_pages == int(0.2 * (2816 - 256))
    just = solve(replace(DEMAND, kv_bytes=CONTEXT_BYTES), DeviceMemory(16 * GiB, 0), 0, SMOLLM2)
    assert (just.pages, just.watermark_pages) == (256, 0)


class TestOneClearError:
    """https://github.com/sgl-project/sglang/issues/28530"""

    def test_too_little_was_asked_for(self) -> None:
        with pytest.raises(NoRoom) as error:
            solve(replace(DEMAND, kv_bytes=4 * 2**20), DeviceMemory(16 * GiB, 0), 0, SMOLLM2)
        assert str(error.value) == (
            f"the KV memory of 4194304 bytes holds 176 tokens, and one request of 4096 tokens needs {CONTEXT_BYTES}"
            f" bytes: lower max_seq_len to 176, or raise kv_cache_bytes to {CONTEXT_BYTES}"
        )

    def test_not_even_a_page_was_asked_for(self) -> None:
        with pytest.raises(NoRoom, match=f"holds 0 tokens.* bytes: raise kv_cache_bytes to {CONTEXT_BYTES}$"):
            solve(replace(DEMAND, kv_bytes=1000), DeviceMemory(16 * GiB, 0), 0, SMOLLM2)

    def test_the_share_is_too_small(self) -> None:
        with pytest.raises(NoRoom, match=r"raise gpu_memory_utilization to 0\.60;"):
            solve(replace(DEMAND, utilization=0.5), DeviceMemory(GiB, GiB // 2), 0, SMOLLM2)

    def test_the_machine_is_too_small(self) -> None:
        with pytest.raises(NoRoom, match=r"lower max_seq_len to \d+, or free 30 MiB of memory;"):
            solve(replace(DEMAND, utilization=1.0), DeviceMemory(GiB, GiB - 2**26), 0, SMOLLM2)

    @given(
        total=st.integers(1, 4 * GiB),
        used=st.floats(0, 1),
        utilization=st.floats(0.01, 1),
        kv_bytes=st.none() | st.integers(1, 4 * GiB),
        default=st.none() | st.just(GiB),
        context=st.integers(1, 50_000),
    )
    def test_what_the_error_advises_helps(
        self, total: int, used: float, utilization: float, kv_bytes: int | None, default: int | None, context: int
    ) -> None:
        demand = Demand(utilization, kv_bytes, default, context, 0.2)
        memory = DeviceMemory(total, int(used * total))
        try:
            budget = solve(demand, memory, 1000, SMOLLM2)
        except NoRoom as error:
            said = str(error).split("needs ")[1].split(";")[0]
            if "max_seq_len" in said:
                solve(replace(demand, context_tokens=number_after(said, "max_seq_len to ")), memory, 1000, SMOLLM2)
            if "kv_cache_bytes" in said:
                raised = replace(demand, kv_bytes=number_after(said, "kv_cache_bytes to "))
                solve(raised, DeviceMemory(100 * GiB, 0), 1000, SMOLLM2)
            if "utilization" in said:
                solve(
                    replace(demand, utilization=float(said.split("utilization to ")[1]), kv_bytes=None),
                    memory,
                    1000,
                    SMOLLM2,
                )
            if "free " in said:
                freed = memory._replace(used_bytes=memory.used_bytes - number_after(said, "free ") * 2**20)
                solve(replace(demand, utilization=1.0, kv_bytes=None), freed, 1000, SMOLLM2)
        else:
            assert budget.pages * 16 >= context
            assert memory.used_bytes + 1000 + budget.kv_bytes <= utilization * total + 1
            assert budget.pages - budget.watermark_pages >= -(-context // 16)


def number_after(text: str, words: str) -> int:
    return int(text.split(words)[1].split(maxsplit=1)[0].strip(",;"))


def test_another_size_changes_pages_and_margin() -> None:
    budget = solve(DEMAND, DeviceMemory(16 * GiB, 0), 0, SMOLLM2)
    small = resized(budget, DEMAND, GiB // 4, SMOLLM2)
    assert (small.pages, small.watermark_pages, small.used_bytes) == (
        64 * 11,
        int(0.2 * (704 - 256)),
        budget.used_bytes,
    )
    with pytest.raises(NoRoom, match="raise kv_cache_bytes"):
        resized(budget, DEMAND, CONTEXT_BYTES - 1, SMOLLM2)
