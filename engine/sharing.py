"""Prefixes that requests share: whole pages, found by the chained hashes of their tokens. No torch here."""

from __future__ import annotations

from engine.memory import Page, PagePool
from engine.sequence import TokenSequence


class PrefixSharing:
    """What sequences find in the pool and put there.

    A page may be found once its tokens' KV is written, so the pages that running sequences are still
    to compute are noted here: whoever needs the same ones had better wait for them.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._coming: dict[bytes, TokenSequence] = {}
        """Pages that are being computed, by hash, with the first who does."""

    def match(self, sequence: TokenSequence) -> list[Page]:
        """The pages that the sequence need not compute, held for it; its last token is always left to be computed."""
        if sequence.root is None:
            return []
        page_size = self._pool.page_size
        whole = (len(sequence.tokens) - 1) // page_size
        return self._pool.match(sequence.page_hashes(page_size)[:whole])

    def comes(self, sequence: TokenSequence, matched: int, level: int) -> bool:
        """Whether the sequence, with so many pages found, had better wait for others that are being computed.

        It does if they are at least half of its work, and if those who compute them are not behind
        `level` in rank. So it never does more work twice than it has of its own.
        """
        if sequence.root is None or sequence.saved_tokens:
            return False
        page_size = self._pool.page_size
        left = len(sequence.tokens) - matched * page_size
        half = -(-left // (2 * page_size))
        coming = sequence.page_hashes(page_size)[matched : (len(sequence.tokens) - 1) // page_size][:half]
        owners = [self._coming.get(page_hash) for page_hash in coming]
        return len(owners) == half and all(owner is not None and owner.level <= level for owner in owners)

    def begin(self, sequence: TokenSequence, matched: int) -> None:
        """The sequence runs, with so many pages found: it computes the others."""
        sequence.shared_pages = matched
        if sequence.root is not None:
            for page_hash in sequence.page_hashes(self._pool.page_size)[matched:]:
                self._coming.setdefault(page_hash, sequence)

    def publish(self, sequence: TokenSequence) -> None:
        """Let others find the pages whose tokens are computed, if it shares any."""
        whole = sequence.computed // self._pool.page_size
        hashes = sequence.page_hashes(self._pool.page_size)
        for index in range(sequence.shared_pages, whole):
            self._pool.publish(sequence.pages[index], hashes[index])
            self._drop(sequence, hashes[index])
        sequence.shared_pages = whole

    def disown(self, sequence: TokenSequence) -> None:
        """Let nobody find the sequence's pages any more, whoever computed them: they may hold what is no number."""
        for page_hash in sequence.hashes[: sequence.shared_pages]:
            self._pool.unpublish(page_hash)

    def end(self, sequence: TokenSequence) -> None:
        """The sequence runs no more: what it didn't compute is for others to compute."""
        for page_hash in sequence.hashes[sequence.shared_pages :]:
            self._drop(sequence, page_hash)
        sequence.shared_pages = 0

    def _drop(self, sequence: TokenSequence, page_hash: bytes) -> None:
        if self._coming.get(page_hash) is sequence:
            del self._coming[page_hash]

    def check(self, running: list[TokenSequence]) -> None:
        """Raise AssertionError if a page is expected of somebody who won't compute it."""
        for page_hash, sequence in self._coming.items():
            assert sequence in running, f"{sequence.id} doesn't run and is waited for"
            assert page_hash in sequence.hashes[sequence.shared_pages :], f"{sequence.id} has computed that page"
        for sequence in running:
            assert sequence.shared_pages * self._pool.page_size <= sequence.computed, f"{sequence.id}: shared too early"
