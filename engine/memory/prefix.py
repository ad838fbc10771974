"""Names of pages by what they contain: each hash covers its page's tokens and, through its parent, all before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def root_hash(namespace: str) -> bytes:
    """The parent of a first page. KV is shared within one namespace only: model revision, adapter, tenant's salt."""
    return blake2b(namespace.encode(), digest_size=_DIGEST_BYTES, person=b"namespace").digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full page of `tokens` that follows the page `parent`."""
    return blake2b(array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES, key=parent, person=b"page").digest()
