"""What ranks exchange, and what becomes of the others when one of them fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from engine.parallel.group import Exchange, Group
from engine.parallel.ranks import RankLost
from tests.unit.engine.parallel.threads import on_ranks

F32 = torch.float32
SUM, GATHER = Exchange("sum", (2, 3), F32), Exchange("gather", (1, 4), F32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_gathers(tmp_path: Path, dtype: torch.dtype) -> None:
    def work(group: Group) -> tuple[list[float], list[list[float]]]:
        with group.step([SUM._replace(dtype=dtype), GATHER._replace(dtype=dtype)]):
            total = group.add(torch.full((2, 3), 1.0 + group.rank, dtype=dtype))
            rows = group.gather(torch.full((1, 4), float(group.rank), dtype=dtype))
        return total[0].tolist(), [row[0].tolist() for row in rows]

    first, second, third = on_ranks(tmp_path, 3, work)
    assert first == ([6.0] * 3, [[0.0] * 4, [1.0] * 4, [2.0] * 4])
    assert second == third == ([6.0] * 3, [])


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_raises_keeps_nobody_waiting(tmp_path: Path, failing: int, at: int) -> None:
    """The others come to the end of the step, and the next one is computed by all."""

    def work(group: Group) -> list[object]:
        found: list[object] = []
        for number in range(2):
            try:
                with group.step([SUM, SUM, GATHER]):
                    for place, exchange in enumerate((group.add, group.add, group.gather)):
                        if (number, group.rank, place) == (0, failing, at):
                            raise MemoryError("short")
                        exchange(torch.ones(2, 3) if place < 2 else torch.ones(1, 4))
                found.append("done")
            except MemoryError as error:
                found.append(str(error))
        return found

    found = on_ranks(tmp_path, 2, work)
    assert found[failing] == ["short", "done"]
    assert found[1 - failing] == ["done", "done"]


def test_one_that_stays_away_is_lost_and_stays_lost(tmp_path: Path) -> None:

    def work(group: Group) -> list[str]:
        if group.rank == 1:
            time.sleep(2)
            return []
        said = []
        for _ in range(2):
            with pytest.raises(RankLost) as lost, group.step([SUM]):
                group.add(torch.ones(2, 3))
            said.append(str(lost.value))
        return said

    said = on_ranks(tmp_path, 2, work, patience_s=0.5)[0]
    assert isinstance(said, list)
    assert said[0] == said[1]
    assert said[0].startswith("rank 0 lost touch with the others")


def test_an_exchange_that_isn_t_the_step_s_next_is_a_fault(tmp_path: Path) -> None:
    def work(group: Group) -> str:
        with pytest.raises(AssertionError) as fault, group.step([SUM]):
            group.add(torch.ones(2, 2) if group.rank else torch.ones(1, 1))
        return str(fault.value)

    assert all("is not the step's next exchange" in str(said) for said in on_ranks(tmp_path, 2, work))


def test_a_step_with_too_few_exchanges_is_a_fault(tmp_path: Path) -> None:
    def work(group: Group) -> str:
        with pytest.raises(AssertionError) as fault, group.step([SUM, GATHER]):
            group.add(torch.ones(2, 3))
        return str(fault.value)

    assert on_ranks(tmp_path, 2, work) == ["a step made fewer exchanges than it should"] * 2
