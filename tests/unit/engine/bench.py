"""Engines over models without weights, checked after every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeModel, fake_token
from engine.reports import StepResult
from engine.request import EngineRequest, RequestOutput, SamplingParams
from kernels.sampling import Sampled

PAGE_BYTES = 4 * 1024
"""Of the fake model, with pages of 4 tokens."""
ENDLESS = {"max_tokens": 500}
OVERLAP = False
"""Whether the steps of benches overlap, unless they are told."""


@dataclass
class Clock:
    """A clock that only tests move."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Bench:
    """An engine whose deltas are collected and whose invariants are checked after each step.

    A batch that the fake model finds wrong is a fault of the engine, which would try it again in parts.
    `texts` and `tokens` are those of first completions, `others` of those behind them.
    """

    engine: Engine
    model: FakeModel
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    others: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    wrong_batches: list[AssertionError] = field(default_factory=list)

    def __post_init__(self) -> None:
        execute = self.model.execute

        def watched(batch: Batch) -> Sampled:
            try:
                return execute(batch)
            except AssertionError as error:
                self.wrong_batches.append(error)
                raise

        self.model.execute = watched  # type: ignore[method-assign]

    def add(
        self,
        id: str,  # noqa: A002
        prompt: str | Sequence[int],
        priority: int = 0,
        tenant: str = "default",
        deadline_s: float | None = None,
        namespace: str = "",
        **params: Any,
    ) -> None:
        given = prompt if isinstance(prompt, str) else tuple(prompt)
        sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params})
        self.engine.add(
            EngineRequest(
                id, sampling, given, priority=priority, tenant=tenant, deadline_s=deadline_s, namespace=namespace
            )
        )

    def step(self) -> StepResult:
        result = self.engine.step()
        if self.wrong_batches:
            raise self.wrong_batches[0]
        self.engine.check()
        self.admitted += [request_id for request_id, _ in result.admitted]
        for delta in result.deltas:
            assert delta.request_id not in self.outputs
            assert delta.text or delta.token_ids
            text, tokens = self.streamed(delta.request_id, delta.index)
            assert delta.offset == len(text)
            text, tokens = text + delta.text, tokens + delta.token_ids
            if delta.index:
                self.others[delta.request_id, delta.index] = text, tokens
            else:
                self.texts[delta.request_id], self.tokens[delta.request_id] = text, tokens
        for output in result.finished:
            assert output.request_id not in self.outputs
            for choice in output.choices:
                assert (choice.text, choice.token_ids) == self.streamed(output.request_id, choice.index)
            assert (output.text, output.token_ids) == (output.choices[0].text, output.choices[0].token_ids)
            self.outputs[output.request_id] = output
        return result

    def streamed(self, request_id: str, index: int = 0) -> tuple[str, tuple[int, ...]]:
        """Text and tokens of a completion, as the deltas had them."""
        if index:
            return self.others.get((request_id, index), ("", ()))
        return self.texts.get(request_id, ""), self.tokens.get(request_id, ())

    def run(self) -> dict[str, RequestOutput]:
        for _ in range(10_000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "no end in sight"
        stats = self.engine.stats()
        assert stats.pages_free == stats.pages_total
        assert (stats.running, stats.waiting, stats.swapped_pages) == (0, 0, 0)
        assert (stats.running_by_priority, stats.waiting_by_priority) == ({}, {})
        return self.outputs

    def one(self, prompt: str | Sequence[int], **params: Any) -> RequestOutput:
        """The output of one request with the engine for itself."""
        request_id = f"one-{len(self.outputs)}"
        self.add(request_id, prompt, **params)
        return self.run()[request_id]


def make_bench(model: FakeModel | None = None, pages: int = 1000, clock: Clock | None = None, **config: Any) -> Bench:
    """An engine with `pages` pages of 4 tokens, and a context that just fits."""
    model = model or FakeModel()
    settings: dict[str, Any] = {
        "page_size": 4,
        "kv_cache_bytes": pages * 4 * model.info.kv_bytes_per_token,
        "max_seq_len": min(4096, 4 * pages),
        "warm_up": False,
        "overlap": OVERLAP,
        **config,
    }
    return Bench(Engine(model, EngineConfig("fake", **settings), clock or time.monotonic), model)


def scripted(script: Sequence[int], prompt_tokens: int = 1, **options: Any) -> FakeModel:
    """A model that answers a prompt of `prompt_tokens` tokens with the script, again and again."""
    return FakeModel(choose=lambda _token, at: script[(at - prompt_tokens) % len(script)], **options)


def expected(prompt: str, max_tokens: int) -> tuple[int, ...]:
    """What the fake model answers to a prompt without marks, whatever else happens."""
    tokens = list(prompt.encode())
    for _ in range(max_tokens):
        tokens.append(fake_token(tokens[-1], len(tokens)))
    return tuple(tokens[-max_tokens:])


class RaisingModel(FakeModel):
    """Raises while `broken` says so of a batch."""

    def __init__(self, broken: Callable[[Batch], bool]) -> None:
        super().__init__()
        self.broken = broken
        self.calls = 0

    def execute(self, batch: Batch) -> Sampled:
        self.calls += 1
        if self.broken(batch):
            raise RuntimeError("out of order")
        return super().execute(batch)
