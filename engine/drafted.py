"""A model beside a smaller one that guesses for it: `speculative_model`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from engine.batch import Batch, Model
from engine.config import EngineConfig
from engine.drafting import Drafter
from engine.memory import Move
from engine.memory.machine import DeviceMemory
from engine.memory.storage import KVStorage
from kernels.kv import KVLayout, Thinning
from kernels.sampling import Sampled
from text.bundle import TextBundle


class DraftedModel:
    """`engine.batch.Model`: the target, with whatever else the draft model needs at the same time."""

    def __init__(
        self, target: Model, draft: Model, config: EngineConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Raises ValueError if their vocabularies differ, or if no guess would be checked."""
        if not target.cheap_rows:
            raise ValueError(
                "speculative_model needs a model of which a row's result doesn't depend on how many are computed"
                " together, or drafts would change the output: the CPU library's are such, and torch serves this one"
            )
        check_vocabulary(target.info.text, draft.info.text)
        self.info = replace(target.info, draft_kv_bytes_per_token=draft.info.kv_bytes_per_token)
        self.cheap_rows = target.cheap_rows
        self.drafter = Drafter(
            draft,
            config.page_size,
            min(draft.info.context_len, config.max_seq_len),
            config.max_num_batched_tokens,
            config.num_speculative_tokens,
            clock,
        )
        self._target = target
        self._draft = draft
        self._clock = clock

    @property
    def default_kv_bytes(self) -> int | None:
        return self._target.default_kv_bytes

    def memory(self) -> DeviceMemory:
        return self._target.memory()

    def take_peak_bytes(self) -> int:
        return self._target.take_peak_bytes()

    def activation_bytes(self, tokens: int, rows: int) -> int:
        """Of both: the one leaves its buffers while the other works."""
        return self._target.activation_bytes(tokens, rows) + self._draft.activation_bytes(tokens, rows)

    def kv_layout(self, page_size: int) -> KVLayout:
        return self._target.kv_layout(page_size)

    def allocate_kv(self, layout: KVLayout, units: int, most_units: int) -> KVStorage:
        own = self._target.allocate_kv(layout, units, most_units)
        theirs = self._draft.kv_layout(layout.page_size)
        needed, most = (theirs.units_for(_pages(layout, count)) for count in (units, own.units))
        return PairedStorage(own, self._draft.allocate_kv(theirs, needed, most), self.drafter)

    def record(self) -> None:
        self._target.record()
        self._draft.record()

    def release_kv(self) -> None:
        self.drafter.forget()
        self._target.release_kv()
        self._draft.release_kv()

    def sleep(self) -> None:
        self._target.sleep()
        self._draft.sleep()

    def wake(self) -> None:
        self._target.wake()
        try:
            self._draft.wake()
        except BaseException:
            self._target.sleep()
            raise

    def execute(self, batch: Batch) -> Sampled:
        began_s = self._clock()
        sampled = self._target.execute(batch)
        self.drafter.target_times.note(len(batch.token_ids), self._clock() - began_s)
        return sampled

    def thin(self, work: Thinning) -> None:
        self._target.thin(work)

    def close(self) -> None:
        self._target.close()
        self._draft.close()


class PairedStorage:
    """`KVStorage` of the target, whose pages move together with the draft model's.

    What is saved of a sequence that makes way is the target's alone: the draft computes it again, if it pays.
    """

    def __init__(self, own: KVStorage, draft: KVStorage, drafter: Drafter) -> None:
        self.layout = own.layout
        self.units = own.units
        self._own = own
        self._draft = draft
        self._drafter = drafter

    def copy_pages(self, moves: Sequence[Move]) -> None:
        self._own.copy_pages(moves)
        self._draft.copy_pages(moves)
        self._drafter.move(moves)

    def save_pages(self, pages: Sequence[int]) -> Any:
        return self._own.save_pages(pages)

    def load_pages(self, saved: Any, pages: Sequence[int]) -> None:
        self._own.load_pages(saved, pages)

    def decommit(self, runs: Iterable[tuple[int, int]]) -> None:
        self._own.decommit(runs)

    def close(self) -> None:
        self._own.close()
        self._draft.close()


def check_vocabulary(target: TextBundle, draft: TextBundle) -> None:
    """Raise ValueError unless each token id means the same to both."""
    if target.tokenizer_json == draft.tokenizer_json and target.vocab_size == draft.vocab_size:
        return
    ours, theirs = (_tokens(text) for text in (target, draft))
    if ours != theirs:
        different = next(token for token in sorted(ours | theirs) if ours.get(token) != theirs.get(token))
        raise ValueError(
            f"speculative_model has another vocabulary: the token {different!r} has the id {theirs.get(different)}"
            f" there and {ours.get(different)} here ({len(theirs)} and {len(ours)} tokens). A draft model has to have"
            " the same tokenizer: a smaller model of the same family"
        )


def _tokens(text: TextBundle) -> dict[str, int]:
    from tokenizers import Tokenizer

    vocabulary: dict[str, int] = Tokenizer.from_str(text.tokenizer_json).get_vocab(with_added_tokens=True)
    return {token: number for token, number in vocabulary.items() if number < text.vocab_size}


def _pages(layout: KVLayout, units: int) -> int:
    """Pages that lie in so many units."""
    return (units >> layout.extent_order) * layout.pages_per_extent
