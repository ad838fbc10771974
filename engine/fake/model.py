"""A model without weights, for tests of everything around a model: `fake`, or `fake:step_s=0.01,context_len=512`.

The likeliest next token is a pure function of the last token and its position, and makes words of
small letters; the others follow in the order of their ids. It is always greedy, and fulfils
everything else that is asked of a row. It never ends a text by itself. Marks in the prompt, N
counted in tokens after the mark:

    <<eos:N>>     the end of text is chosen at N
    <<raise:N>>   every step that holds the request raises once it knows N tokens after the mark
    <<die:N>>     as above, but the process kills itself
    <<abort:N>>   as above, but the process aborts, as native code does that has lost its way

`:N` may be left out and is 0 then. The model keeps the token of each slot as its KV, and checks in
each step that a request's context, read through its block table, is what the request knows.
"""

from __future__ import annotations

import os
import re
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from engine.batch import HOST_KV_BYTES, Batch, Model, ModelInfo
from engine.fake.sampling import take
from engine.fake.storage import FakeStorage
from engine.fake.text import fake_text
from engine.memory.machine import DeviceMemory
from engine.pooling import Pooling
from kernels.kv import KVLayout, Thinning
from kernels.sampling import Sampled, TokenLogprobs
from text.bundle import TextBundle

_OPTION = {"step_s": float, "context_len": int, "kv_bytes_per_token": int, "revision": str}
_ADAPTER = 2**32
"""A token's entry in the KV holds this, times the number of the adapter that computed it."""
FAKE_DEVICE_BYTES = 2**36
"""Memory of the device that the fake model runs on."""
_MARK = re.compile(r"<<(eos|raise|die|abort)(?::(\d+))?>>")


def fake_token(token_id: int, position: int) -> int:
    """The token at `position` that follows `token_id`: a small letter, or a space after five of them."""
    mixed = (token_id * 2654435761 + position * 40503) >> 3
    return ord(" ") if position % 6 == 5 and token_id != ord(" ") else ord("a") + mixed % 26


class FakeModel:
    """Fulfils `engine.batch.Model` in plain Python."""

    def __init__(
        self,
        step_s: float = 0.0,
        context_len: int = 32768,
        kv_bytes_per_token: int = 1024,
        text: TextBundle | None = None,
        choose: Callable[[int, int], int] = fake_token,
        revision: str = "1",
        cheap_rows: int = 0,
        reach_tokens: int | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        """`choose` gives the token that follows a token at a position; adapters, which need no files, shift positions
        by their numbers."""
        text = text or fake_text()
        self.info = ModelInfo(
            revision=f"fake-{revision}",
            device="fake",
            dtype="none",
            context_len=context_len,
            vocab_size=text.vocab_size,
            kv_bytes_per_token=kv_bytes_per_token,
            text=text,
            pooling=Pooling("mean"),
            reach_tokens=reach_tokens,
            adapters={name: f"fake-{name}" for name in adapters},
        )
        self.step_s = step_s
        self.cheap_rows = cheap_rows
        self._choose = choose
        self._storage: FakeStorage | None = None
        self._asleep = False
        self._ends = 0, 0
        """First and last tokens that every thinned request has kept."""

    @property
    def default_kv_bytes(self) -> int:
        return HOST_KV_BYTES

    def memory(self) -> DeviceMemory:
        return DeviceMemory(FAKE_DEVICE_BYTES, 0)

    def take_peak_bytes(self) -> int:
        return 0

    def activation_bytes(self, tokens: int, rows: int) -> int:
        return 0

    def kv_layout(self, page_size: int) -> KVLayout:
        return KVLayout(1, 1, self.info.kv_bytes_per_token // 2, 1, page_size)

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> FakeStorage:
        self._storage = FakeStorage(layout, max(units, most_units))
        return self._storage

    def record(self) -> None:
        """Nothing makes it faster."""

    def release_kv(self) -> None:
        self._storage = None

    def sleep(self) -> None:
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def execute(self, batch: Batch) -> Sampled:
        if self.step_s:
            time.sleep(self.step_s)
        storage = self._storage
        if storage is None:
            raise RuntimeError("allocate_kv must be called before the first step")
        assert not self._asleep, "a step runs while the model sleeps"
        storage.write(_computed_by(batch), batch.slots)
        ends = []
        for row in range(len(batch.context_len)):
            context = self._read(storage, batch, row)
            ends.append(self._obey(context))
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for sampled, at in enumerate(batch.sample_rows):
            request = bisect_right(batch.query_start, at) - 1
            last = at + 1 == batch.query_start[request + 1]
            wanted = self._wanted(batch, at, sampled, ends[request] and last)
            token, told = take(wanted, self.info.vocab_size, batch.sampling, sampled)
            tokens.append(token)
            logprobs.append(told)
        sums = [
            np.array([sum(batch.token_ids[first:end]), sum(batch.positions[first:end])], np.float32)
            for first, end in batch.pooled
        ]
        return Sampled(tokens, None if batch.sampling.logprobs is None else logprobs, sums)

    def thin(self, work: Thinning) -> None:
        storage = self._storage
        assert storage is not None, "there is no KV to be thinned"
        held = storage.read(work.pages, work.tokens)
        middle = range(work.first, work.tokens - work.last)
        best = sorted(middle, key=lambda at: (held[at] * 2654435761 % 97, at))[: work.kept - work.first - work.last]
        kept = held[: work.first] + [held[at] for at in sorted(best)] + held[work.tokens - work.last :]
        size = storage.layout.page_size
        storage.write(kept, [work.pages[at // size] * size + at % size for at in range(len(kept))])
        self._ends = work.first, work.last

    def close(self) -> None:
        self._storage = None

    def _wanted(self, batch: Batch, at: int, sampled: int, end: bool) -> tuple[int, ...]:
        """The likeliest tokens of one row: the end of text if it ends here, and what follows."""
        position = batch.positions[at] + 1
        assert batch.sampling.position[sampled] == position, "a row is sampled for another position"
        ends = self.info.text.eos_token_ids[:1] if end else ()
        shift = batch.adapters[bisect_right(batch.query_start, at) - 1] if batch.adapters else 0
        return (*ends, self._choose(batch.token_ids[at], position + shift))

    def _read(self, storage: FakeStorage, batch: Batch, row: int) -> list[int]:
        """The context of a request, as its block table gives it."""
        length, first, last = batch.context_len[row], batch.query_start[row], batch.query_start[row + 1]
        if batch.evicted and batch.evicted[row]:
            return self._read_thinned(storage, batch, row)
        reach, page_size = self.info.reach_tokens or length, storage.layout.page_size
        unseen = max(0, length - (last - first) - reach + 1) // page_size
        context = batch.known_tokens[row][: unseen * page_size] if unseen else []
        kept = storage.read(batch.block_tables[row][unseen:], length - unseen * page_size)
        number = batch.adapters[row] if batch.adapters else 0
        context += [entry - number * _ADAPTER for entry in kept] if number else kept
        assert batch.positions[first:last] == list(range(length - last + first, length)), "positions are wrong"
        assert context[length - last + first :] == batch.token_ids[first:last], "tokens were written to other slots"
        if batch.known_tokens:
            known = batch.known_tokens[row][:length]
            lacks = len(known) == length - 1 and any(last - 1 == at for at, _ in batch.carried)
            assert context == (known + context[-1:] if lacks else known), "the KV of a request is not its own"
        return context

    def _read_thinned(self, storage: FakeStorage, batch: Batch, row: int) -> list[int]:
        """The whole context of a thinned request; its pages hold tokens of it, in their order, with both ends whole."""
        first, last = batch.query_start[row], batch.query_start[row + 1]
        length, evicted, rows = batch.context_len[row], batch.evicted[row], last - first
        kept, context = storage.read(batch.block_tables[row], length), batch.known_tokens[row][: length + evicted]
        if any(last - 1 == at for at, _ in batch.carried) and len(context) < length + evicted:
            context = [*context, batch.token_ids[last - 1]]
        assert batch.positions[first:last] == list(range(len(context) - rows, len(context))), "positions are wrong"
        assert kept[length - rows :] == batch.token_ids[first:last], "tokens were written to other slots"
        assert len(kept) == length, "a thinned request lacks tokens"
        head, tail = self._ends
        assert kept[:head] == context[:head], "a thinned request has lost its first tokens"
        assert kept[-tail - rows :] == context[-tail - rows :], "a thinned request has lost its last tokens"
        left = iter(context)
        assert all(token in left for token in kept), "a thinned request's KV is not its own"
        return context

    def _obey(self, context: list[int]) -> bool:
        """Do what the prompt's marks ask for; whether the text ends here."""
        if ord("<") not in context:
            return False
        end = False
        for mark in _MARK.finditer("".join(map(chr, context))):
            if len(context) - mark.end() < int(mark[2] or 0):
                continue
            if mark[1] == "raise":
                raise RuntimeError("the prompt asked for this error")
            if mark[1] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if mark[1] == "abort":
                os.abort()
            end = True
        return end


def _computed_by(batch: Batch) -> list[int]:
    """[T] what is kept of each token: itself, and the adapter that computed it."""
    entries = list(batch.token_ids)
    for number, (first, end) in zip(batch.adapters, pairwise(batch.query_start), strict=False):
        entries[first:end] = [number * _ADAPTER + token for token in entries[first:end]]
    return entries


def is_fake(model: str) -> bool:
    """Whether a model's name asks for the fake one."""
    return model == "fake" or model.startswith("fake:")


def load_fake(model: str, adapters: Sequence[str] = ()) -> Model:
    """The fake model with the options of its name: `fake:step_s=0.01,context_len=512`; of adapters only the names."""
    options: dict[str, float | int | str] = {}
    for option in filter(None, model.partition(":")[2].split(",")):
        name, _, value = option.partition("=")
        if name not in _OPTION:
            raise ValueError(f"the fake model has no option {name!r}; it has {', '.join(_OPTION)}")
        options[name] = _OPTION[name](value)
    return FakeModel(**options, adapters=adapters)  # type: ignore[arg-type]
