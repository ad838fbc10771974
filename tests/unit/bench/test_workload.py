"""The benchmark's jobs are the same for both sides, new in each round, and of the lengths that are claimed."""

from __future__ import annotations

from bench.workload import MAX_PROMPT_TOKENS, MIN_PROMPT_TOKENS, FixedWork, Workload, make_workload


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


def test_the_fixed_work_is_the_one_that_is_described() -> None:
    work = FixedWork.read()
    assert len(work.w1.prompts) == 64
    assert work.w1.prompt_tokens == 8598
    assert (min(map(len, work.w1.prompts)), max(map(len, work.w1.prompts))) == (33, 256)
    assert work.w1.max_tokens == work.w2.max_tokens == work.w3.max_tokens == 128
    assert len(work.w2_prefix) == 256
    assert [prompt[256:] for prompt in work.w2.prompts] == list(work.w1.prompts)
    assert {prompt[:256] for prompt in work.w2.prompts} == {work.w2_prefix}
    assert [len(prompt) for prompt in work.w3.prompts] == [128] * 5
    ids = [token for prompt in (*work.w2.prompts, *work.w3.prompts) for token in prompt]
    assert min(ids) >= 0
    assert max(ids) < 49152


def test_a_quick_piece_is_small() -> None:
    work = FixedWork.read().quick(4, 8)
    assert len(work.w1.prompts) == len(work.w2.prompts) == 4
    assert work.w1.max_tokens == 8
    assert len(work.w3.prompts) == 1
