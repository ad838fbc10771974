"""What the library's sampling gives back."""

from __future__ import annotations

import numpy as np

from kernels.cpu.sampling import CHOSEN, Rows
from kernels.sampling import TokenLogprobs


class Chosen:
    """Where the results of some rows go."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        count = len(rows.structs)
        self._tops: list[int] = rows.structs["top_logprobs"].tolist()
        self.most_top = max(0, *self._tops, 0)
        self.chosen = np.zeros(count, CHOSEN)
        self.top_ids = np.empty((count, self.most_top), np.int32)
        self.top_logprobs = np.empty((count, self.most_top), np.float64)

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.chosen["token"].tolist()
        return tokens

    def reports(self) -> list[TokenLogprobs | None] | None:
        """Of each row, or None if no row reports."""
        if max(self._tops, default=-1) < 0:
            return None
        reports: list[TokenLogprobs | None] = []
        for row, top in enumerate(self._tops):
            if top < 0:
                reports.append(None)
                continue
            likeliest = zip(self.top_ids[row, :top].tolist(), self.top_logprobs[row, :top].tolist(), strict=True)
            token, rank, logprob = self.chosen[row].tolist()
            reports.append(TokenLogprobs(token, logprob, rank, tuple(likeliest)))
        return reports
