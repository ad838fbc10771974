"""The jobs: prompts of real text, as token ids, so that both sides get the very same work."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).with_name("text.txt")
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
