"""`transformers`' own `generate`, one prompt at a time or in static batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bench.sides.protocol import Arrival, Played, Prompt, serve


class Transformers:
    """Batches are padded on the left, and each runs until its last token before the next begins."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._model_directory = options["model"]
        self._batch = options["batch"]
        self._threads = options["threads"]

    def load(self) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(self._threads)
        torch.set_grad_enabled(False)
        auto: Any = transformers.AutoModelForCausalLM
        self._model = auto.from_pretrained(self._model_directory, dtype=torch.bfloat16).eval()
        return {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "settings": {"dtype": "bfloat16", "batch": self._batch, "threads": self._threads},
        }

    def reset(self) -> None:
        """No prefix is kept."""

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        batches = (prompts[start : start + self._batch] for start in range(0, len(prompts), self._batch))
        return [output for batch in batches for output in self._generate(batch, max_tokens)]

    def _generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        import torch

        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[list[int]] = output[:, width:].tolist()
        return tokens

    def play(self, arrivals: list[Arrival]) -> list[Played]:
        raise NotImplementedError("transformers' generate takes no requests while it runs")

    def processes(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        """Nothing outlives the process."""


if __name__ == "__main__":
    serve(Transformers)
