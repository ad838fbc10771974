"""Headrace's engine, alone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from bench.sides.protocol import Arrival, Played, Prompt, serve


class Headrace:
    """Steps the engine itself, as `LLM` does. Every run has a namespace of its own: no prefix outlives it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._config = options["config"] | {"threads": options["threads"]}
        self._runs = 0

    def load(self) -> dict[str, Any]:
        from engine.config import EngineConfig
        from engine.engine import Engine
        from engine.model import load_model

        config = EngineConfig(**self._config)
        model = load_model(config)
        self._engine = Engine(model, config)
        info = model.info
        return {
            "versions": {"headrace": _version()},
            "settings": {**self._config, "device": info.device, "dtype": info.dtype},
        }

    def reset(self) -> None:
        self._runs += 1

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        for number, prompt in enumerate(prompts):
            self._add(number, prompt, max_tokens)
        outputs: dict[str, list[int]] = {}
        while self._engine.has_work:
            for output in self._engine.step().finished:
                if output.error:
                    raise RuntimeError(output.error)
                outputs[output.request_id] = list(output.token_ids)
        return [outputs[str(number)] for number in range(len(prompts))]

    def play(self, arrivals: list[Arrival]) -> list[Played]:
        began_s = time.perf_counter()
        played: list[Played] = [{"arrived_s": arrival["at_s"], "token_s": []} for arrival in arrivals]
        awaited = {str(number) for number, arrival in enumerate(arrivals) if arrival["awaited"]}
        entered = 0
        while awaited:
            now_s = time.perf_counter() - began_s
            while entered < len(arrivals) and arrivals[entered]["at_s"] <= now_s:
                self._add(entered, arrivals[entered]["prompt"], arrivals[entered]["max_tokens"])
                entered += 1
            if not self._engine.has_work:
                time.sleep(max(0.0, arrivals[entered]["at_s"] - now_s))
                continue
            result = self._engine.step()
            now_s = time.perf_counter() - began_s
            for delta in result.deltas:
                played[int(delta.request_id)]["token_s"] += [now_s] * len(delta.token_ids)
            awaited.difference_update(output.request_id for output in result.finished)
        self._engine.abort_all()
        self._engine.report()
        return played

    def _add(self, number: int, prompt: Prompt, max_tokens: int) -> None:
        from engine.request import EngineRequest, SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add(EngineRequest(str(number), params, tuple(prompt), namespace=f"run {self._runs}"))

    def processes(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        """Nothing outlives the process."""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headrace-server")
    except PackageNotFoundError:
        return "from a working tree"


if __name__ == "__main__":
    serve(Headrace)
