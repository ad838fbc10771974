"""Signatures of Celery messages: who can write to the broker can't make a job unless it has the key.

A signature is a header of the message: when it was made, and an HMAC-SHA256 of that, the task's name and id, and the
keyword arguments, all as one JSON text. What else a message has (its priority, its callbacks, its trace) isn't signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.wire import TASK_GENERATE

SIGNATURE_HEADER = "headrace-signature"
LIFE_S = 7 * 86400
"""A signature of a whole request holds for so long. The ledger knows the jobs of that time, so none runs again."""
AHEAD_S = 300
"""How far the clock of whoever signed may be ahead."""
MIN_KEY_CHARS = 16

_SIGNATURE = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})")


class BadSignature(ValueError):
    """The message isn't signed, or not by this key, or something in it was changed."""


def sign(
    key: str, task_id: str, kwargs: Mapping[str, Any], now_s: float | None = None, task: str = TASK_GENERATE
) -> str:
    """The header's value for a message with these keyword arguments."""
    at_s = int(time.time() if now_s is None else now_s)
    return f"t={at_s},v1={_digest(key, at_s, task, task_id, kwargs)}"


def check(
    keys: Sequence[str], signature: object, task: str, task_id: str, kwargs: Mapping[str, Any], now_s: float
) -> None:
    """Raise BadSignature unless one of `keys` has signed this message, not too long ago.

    A message that only names a job of the ledger may be as old as it likes: what it can start, the ledger decides.
    """
    if signature is None:
        raise BadSignature(f"the message is not signed (header {SIGNATURE_HEADER})")
    match = _SIGNATURE.fullmatch(signature) if isinstance(signature, str) else None
    if match is None:
        raise BadSignature(f"the header {SIGNATURE_HEADER} is no signature")
    at_s, digest = int(match.group(1)), match.group(2)
    try:
        expected = [_digest(key, at_s, task, task_id, kwargs) for key in keys]
    except (TypeError, ValueError, RecursionError):
        raise BadSignature("the message holds what can't be signed") from None
    if not any([hmac.compare_digest(digest, each) for each in expected]):  # noqa: C419 (in constant time)
        raise BadSignature("the signature is not that of this message, or its key is another one")
    if set(kwargs) != {"job_id"} and not -LIFE_S <= at_s - now_s <= AHEAD_S:
        raise BadSignature(f"the signature was made more than {LIFE_S // 86400} days ago, or in the future")


def _digest(key: str, at_s: int, task: str, task_id: str, kwargs: Mapping[str, Any]) -> str:
    """Of the values as they are after the broker: JSON has no tuples, and no keys that are numbers."""
    plain = json.loads(json.dumps(kwargs, allow_nan=False))
    text = json.dumps([task, task_id, at_s, plain], sort_keys=True, separators=(",", ":"))
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
