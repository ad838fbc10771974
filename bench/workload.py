"""The work: fixed prompts for the engines, and prompts that are new in each round for whole systems."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TEXT = Path(__file__).with_name("text.txt")
FIXED = Path(__file__).with_name("workloads.json")
MIN_PROMPT_TOKENS = 32
MAX_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one round, and how many tokens each is to be given."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int

    def subset(self, count: int) -> Workload:
        """A few prompts that stand for all: evenly spaced among the prompts in the order of their lengths."""
        ordered = sorted(self.prompts, key=len)
        step = len(ordered) / count
        return Workload(tuple(ordered[int(step * (index + 0.5))] for index in range(count)), self.max_tokens)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class FixedWork:
    """The workloads of `workloads.json`: token ids of real text (licences), made once with SmolLM2's tokenizer."""

    w1: Workload
    """64 prompts of 32 to 256 tokens."""
    w2_prefix: tuple[int, ...]
    """256 tokens that every prompt of W2 begins with."""
    w3: Workload
    """Prompts of 128 tokens, to be run alone, one after the other."""

    @classmethod
    def read(cls) -> Self:
        found = json.loads(FIXED.read_text())
        new = found["max_tokens"]
        w1, w3 = (Workload(tuple(map(tuple, found[name])), new) for name in ("w1", "w3"))
        return cls(w1, tuple(found["w2_prefix"]), w3)

    @property
    def w2(self) -> Workload:
        """W1 behind the shared prefix."""
        return Workload(tuple(self.w2_prefix + prompt for prompt in self.w1.prompts), self.w1.max_tokens)

    def quick(self, prompts: int, max_tokens: int) -> FixedWork:
        """A small piece of it, to try the benchmark itself."""
        w1 = Workload(self.w1.subset(prompts).prompts, max_tokens)
        return FixedWork(w1, self.w2_prefix[:64], Workload(self.w3.prompts[:1], max_tokens))


def make_workload(encode: Callable[[str], list[int]], jobs: int, max_tokens: int, round_number: int) -> Workload:
    """`jobs` prompts of 32 to 256 tokens. Every round has its own, so that no side has seen one before.

    Each begins with its own number: no two share a prefix, and a prefix cache can help nobody.
    """
    sentences = _sentences()
    draw = random.Random(round_number)
    prompts = []
    for number in range(jobs):
        length = draw.randint(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS)
        ids = encode(f"{round_number}.{number}.")
        while len(ids) < length:
            ids += encode(" " + draw.choice(sentences))
        prompts.append(tuple(ids[:length]))
    return Workload(tuple(prompts), max_tokens)


def _sentences() -> list[str]:
    text = re.sub(r"\s+", " ", TEXT.read_text())
    return [sentence for sentence in re.split(r"(?<=[.;:])\s+", text) if len(sentence) > 30]
