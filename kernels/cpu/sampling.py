"""Sampling on the CPU: the rows of a step as an array of structs, shared among a team's threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.layers import address, expect
from kernels.cpu.library import Team
from kernels.sampling import GREEDY_TEMPERATURE, Adjustment, Sampled, SamplingBatch, TokenLogprobs

ROW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("position", np.int64),
        ("top_k", np.int32),
        ("forced", np.int32),
        ("top_logprobs", np.int32),
        ("prompt_count", np.int32),
        ("tokens", np.uint64),
        ("bias_ids", np.uint64),
        ("bias", np.uint64),
        ("banned", np.uint64),
        ("allowed", np.uint64),
        ("token_count", np.int64),
        ("bias_count", np.int64),
        ("banned_count", np.int64),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("reserved", np.int32),
    ]
)
"""`SamplingRow` of src/sampling_types.h."""
CHOSEN = np.dtype([("token", np.int32), ("rank", np.int32), ("logprob", np.float64)])
if (ROW.itemsize, CHOSEN.itemsize) != (136, 16):
    raise ImportError("the structs of kernels.cpu.sampling differ from those of the C++ library")

COUNTS = {"tokens": "token_count", "bias_ids": "bias_count", "banned": "banned_count"}
"""How many ids each pointer leads to."""
MOST_TOP_K = 2**31 - 1


class Rows:
    """The struct of each row of a batch; holds the arrays that the structs point to."""

    def __init__(self, batch: SamplingBatch, vocab: int) -> None:
        self._vocab = vocab
        self._held: list[NDArray[Any]] = []
        self.structs = np.zeros(len(batch.temperature), ROW)
        structs = self.structs
        structs["temperature"] = batch.temperature
        structs["top_p"] = batch.top_p
        structs["min_p"] = batch.min_p
        structs["seed"] = [seed & (2**64 - 1) for seed in batch.seed]
        structs["position"] = batch.position
        structs["top_k"] = np.minimum(batch.top_k, MOST_TOP_K)
        structs["forced"] = batch.forced if batch.forced is not None else -1
        structs["top_logprobs"] = np.minimum(batch.logprobs, vocab) if batch.logprobs is not None else -1
        structs["repetition"] = 1
        if structs["forced"].size and structs["forced"].max() >= vocab:
            raise ValueError(f"a forced token lies outside the vocabulary of {vocab}")
        for row, banned in enumerate(batch.banned):
            if banned:
                self._point(row, "banned", banned)
        for row, adjustment in enumerate(batch.adjust or ()):
            if adjustment is not None:
                self._adjust(row, adjustment)

    def _adjust(self, row: int, adjustment: Adjustment) -> None:
        for name in ("repetition", "frequency", "presence"):
            self.structs[name][row] = getattr(adjustment, name)
        if adjustment.tokens and (adjustment.repetition != 1 or adjustment.frequency or adjustment.presence):
            self._point(row, "tokens", adjustment.tokens)
            self.structs["prompt_count"][row] = adjustment.prompt_tokens
        if adjustment.bias:
            ids, additions = zip(*adjustment.bias, strict=True)
            self._point(row, "bias_ids", ids)
            self.structs["bias"][row] = self._hold(np.array(additions, np.float32))
        if adjustment.allowed is not None:
            if len(adjustment.allowed) * 8 < self._vocab:
                raise ValueError(f"{len(adjustment.allowed)} bytes hold no bit for each of {self._vocab} tokens")
            self.structs["allowed"][row] = self._hold(np.frombuffer(adjustment.allowed, np.uint8))

    def _point(self, row: int, name: str, ids: Sequence[int]) -> None:
        """Let the row's pointer `name` and its count name these token ids."""
        array = np.array(ids, np.int32)
        if array.min() < 0 or array.max() >= self._vocab:
            raise ValueError(f"a token id in {name} lies outside the vocabulary of {self._vocab}")
        self.structs[name][row] = self._hold(array)
        self.structs[COUNTS[name]][row] = len(ids)

    def _hold(self, array: NDArray[Any]) -> int:
        self._held.append(array)
        return int(array.ctypes.data)


def rows_with_logits(sampling: SamplingBatch) -> list[int]:
    """The rows whose logits are wanted: of the others the greatest one's id is all."""
    rows = range(len(sampling.temperature))
    plain = sampling.adjust is None and sampling.forced is None and sampling.logprobs is None
    if plain and max(sampling.temperature, default=0) < GREEDY_TEMPERATURE and not any(sampling.banned):
        return []
    return [
        row
        for row in rows
        if not sampling.is_greedy(row)
        or sampling.banned[row]
        or (sampling.adjust is not None and sampling.adjust[row] is not None)
        or (sampling.forced is not None and sampling.forced[row] >= 0)
        or (sampling.logprobs is not None and sampling.logprobs[row] >= 0)
    ]


def select(sampling: SamplingBatch, rows: Sequence[int]) -> SamplingBatch:
    """The parameters of some rows."""
    columns: dict[str, Any] = {}
    for field in fields(sampling):
        column = getattr(sampling, field.name)
        columns[field.name] = None if column is None else tuple(column[row] for row in rows)
    return SamplingBatch(**columns)


class Chosen:
    """Where the results of some rows go."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        count = len(rows.structs)
        self._tops: list[int] = rows.structs["top_logprobs"].tolist()
        self.most_top = max([0, *self._tops])
        self.chosen = np.zeros(count, CHOSEN)
        self.top_ids = np.full((count, self.most_top), -1, np.int32)
        """-1 where a row has no more: logits that are no numbers are no candidates."""
        self.top_logprobs = np.zeros((count, self.most_top), np.float64)

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
            pairs = zip(self.top_ids[row, :top].tolist(), self.top_logprobs[row, :top].tolist(), strict=True)
            likeliest = tuple(pair for pair in pairs if pair[0] >= 0)
            token, rank, logprob = self.chosen[row].tolist()
            reports.append(TokenLogprobs(token, logprob, rank, likeliest))
        return reports


class Sampler:
    """Chooses tokens with a team's threads, whose memory for this it keeps. One thread at a time may use it."""

    def __init__(self, team: Team, vocab: int) -> None:
        size = team.library.cdll.headrace_sampling_bytes
        size.restype = ctypes.c_int64
        self._team = team
        self._vocab = vocab
        self._memory = np.zeros(team.threads * size(ctypes.c_int64(vocab)), np.uint8)

    def sample(self, logits: NDArray[np.float32], batch: SamplingBatch) -> Sampled:
        """As `kernels.protocol.Kernels.sample`, without changing `logits` [S, V]."""
        count = len(batch.temperature)
        expect(logits, np.float32, (count, self._vocab), "the logits")
        results = Chosen(Rows(batch, self._vocab))
        self._team.library.call(
            "sample",
            self._team.handle,
            ctypes.c_void_p(address(results.rows.structs)),
            ctypes.c_int64(count),
            ctypes.c_void_p(address(logits)),
            ctypes.c_int64(self._vocab),
            ctypes.c_void_p(address(self._memory)),
            ctypes.c_void_p(address(results.chosen)),
            ctypes.c_void_p(address(results.top_ids)),
            ctypes.c_void_p(address(results.top_logprobs)),
            ctypes.c_int64(results.most_top),
        )
        return Sampled(results.tokens, results.reports())
