"""A fact hidden in a long text: whether a model that keeps less of the text still finds it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.config import EngineConfig
from engine.llm import LLM
from engine.model import load_text
from engine.quality import sample_text
from engine.request import SamplingParams
from text.tokenizer import Tokenizer

ANSWER_TOKENS = 8
QUESTION = "\n\nThe pass phrase of the old mill is"


@dataclass(frozen=True, slots=True)
class Needle:
    """A text with a number in it, which ends where the number has to be said again."""

    prompt: tuple[int, ...]
    depth: float
    """Where in the text the number stands, from 0 to 1."""
    answer: str


def needles(config: EngineConfig, tokens: int, count: int) -> list[Needle]:
    """So many texts of `tokens` tokens each, all different, with the number at evenly spaced depths."""
    bundle, _, _ = load_text(config)
    tokenizer = Tokenizer(bundle)
    filler = list(tokenizer.encode_prompt(sample_text()))
    question = list(tokenizer.encode_prompt(QUESTION))
    made = []
    for number in range(count):
        answer = str(10007 + number * 102947 % 89993)
        fact = list(tokenizer.encode_prompt(f"{QUESTION} {answer}. Remember it.\n\n"))
        body = tokens - len(fact) - len(question)
        start = number * 911 % len(filler)
        text = ((filler + filler) * (1 + body // len(filler)))[start : start + body]
        depth = (number + 0.5) / count
        place = int(depth * body)
        made.append(Needle((*text[:place], *fact, *text[place:], *question), depth, answer))
    return made


def found(config: EngineConfig, asked: list[Needle]) -> list[bool]:
    """Load the model as `config` says and let it answer; which numbers it says."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(**{field.name: getattr(config, field.name) for field in fields(config)}) as llm:
        outputs = llm.generate([needle.prompt for needle in asked], params)
    return [output.text.strip().startswith(needle.answer) for output, needle in zip(outputs, asked, strict=True)]
