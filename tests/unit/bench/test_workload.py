"""The benchmark's jobs are the same for both sides, new in each round, and of the lengths that are claimed."""

from __future__ import annotations

from bench.workload import MAX_PROMPT_TOKENS, MIN_PROMPT_TOKENS, Workload, make_workload


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_prompts_have_the_lengths_that_the_report_names() -> None:
    work = make_workload(encode, 64, 128, round_number=0)
    lengths = [len(prompt) for prompt in work.prompts]
    assert len(lengths) == 64
    assert min(lengths) >= MIN_PROMPT_TOKENS
    assert max(lengths) <= MAX_PROMPT_TOKENS
    assert len(set(lengths)) > 30
    assert work.prompt_tokens == sum(lengths)


def test_a_round_can_be_repeated_and_no_two_prompts_share_a_page() -> None:
    first, again = (make_workload(encode, 64, 128, round_number=1) for _ in range(2))
    other = make_workload(encode, 64, 128, round_number=2)
    assert first == again
    beginnings = [prompt[:16] for prompt in (*first.prompts, *other.prompts)]
    assert len(set(beginnings)) == len(beginnings)


def test_a_subset_stands_for_the_whole() -> None:
    work = Workload(tuple((0,) * length for length in range(100, 164)), 128)
    subset = work.subset(4)
    assert [len(prompt) for prompt in subset.prompts] == [108, 124, 140, 156]
    assert abs(subset.prompt_tokens / 4 - work.prompt_tokens / 64) < 1
    assert work.subset(64) == work
