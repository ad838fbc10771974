"""How a model makes one vector of a text: from which tokens, and how it is finished. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Pooling:
    """The mean of the last hidden states of some of a text's tokens."""

    kind: Literal["last", "mean", "first"] = "last"
    normalised: bool = False
    """Whether the vector has the length 1."""

    def tokens(self, start: int, end: int, total: int) -> range:
        """Those of tokens `start : end` of `total` that count."""
        match self.kind:
            case "mean":
                return range(start, end)
            case "first":
                return range(start, min(end, 1))
            case "last":
                return range(max(start, total - 1), end)

    def finish(self, sums: NDArray[np.float32], total: int) -> tuple[float, ...]:
        """The vector, from the sum over the tokens that count of a text of `total` tokens."""
        vector: NDArray[Any] = sums.astype(np.float64) / (total if self.kind == "mean" else 1)
        if self.normalised:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return tuple(vector.tolist())


DEFAULT_POOLING = Pooling()
"""That of a decoder whose files say nothing."""
