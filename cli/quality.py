"""`headrace models check`: what a form of the weights costs in quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from cli.output import Failure, err, out

if TYPE_CHECKING:
    from engine.quality import Scores
    from settings import Settings


@dataclass(frozen=True, slots=True)
class Measurement:
    """One form of the weights on the fixed text."""

    weights: str
    tokens: int
    """Predicted."""
    perplexity: float
    agreement: float
    """Share of the tokens at which greedy decoding takes the same one as with float32 weights."""


def measure(settings: Settings, quantization: str) -> list[Measurement]:
    """float32, bfloat16 and the asked form, in this order."""
    forms: dict[str, dict[str, Any]] = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}}
    if quantization != "none":
        forms[quantization] = {"quantization": quantization}
    measured: list[Measurement] = []
    exact: Scores | None = None
    for form, config in forms.items():
        with err.status(f"{settings.model.name}: {form}"):
            scores = _score(settings, config)
        exact = exact or scores
        measured.append(Measurement(form, len(scores.logprobs), scores.perplexity, scores.agreement(exact)))
    return measured


def _score(settings: Settings, config: dict[str, Any]) -> Scores:
    from engine.config import EngineConfig
    from engine.model.catalog import ModelNotFound
    from engine.model.wheel import PullFailed
    from engine.quality import PIECE_TOKENS, sample_text, score

    model = settings.model
    try:
        return score(
            EngineConfig(
                model=model.model_path,
                cache=settings.cache,
                device=model.device,
                kernels=model.kernels,
                threads=model.threads,
                max_seq_len=PIECE_TOKENS,
                **config,
            ),
            sample_text(),
        )
    except (ModelNotFound, PullFailed, OSError, RuntimeError, ValueError) as error:
        raise Failure(f"{model.model_path} can't be measured: {error}") from None


def print_measurements(model: str, measured: Sequence[Measurement]) -> None:
    """A table, each form a row."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("Weights")
    for column in ("Perplexity", "Greedy agreement with float32"):
        table.add_column(column, justify="right")
    for one in measured:
        table.add_row(one.weights, f"{one.perplexity:.3f}", f"{one.agreement:.2%}")
    out.print(f"[bold]{model}[/]: {measured[0].tokens} predicted tokens of a fixed text")
    out.print(table)
