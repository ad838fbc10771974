"""Whether the broker answers, asked on a thread of its own, so that the hub needn't wait for one that is silent."""

from __future__ import annotations

import threading
from typing import Self

import redis
from celery.utils.log import get_logger
from headrace.waits import Backoff

log = get_logger(__name__)

ANSWER_S = 2.0
"""How long one question may stay unanswered."""


class BrokerProbe(threading.Thread):
    """Asks from `with` on, until the broker has answered or the block is left."""

    def __init__(self, url: str) -> None:
        super().__init__(name="headrace-broker-probe", daemon=True)
        self.answered = threading.Event()
        self._url = url
        self._left = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        self.answered.wait(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def run(self) -> None:
        backoff = Backoff(0.2, 3.0)
        patience = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S}
        while not self._left.is_set():
            try:
                # A connection that was made before the broker fell silent says nothing.
                with redis.Redis.from_url(self._url, **patience) as client:
                    client.ping()
            except (redis.RedisError, OSError) as exc:
                pause_s = backoff.delay_s()
                log.error("the broker can't be reached: %s; trying again in %.1f s", exc, pause_s)
                self._left.wait(pause_s)
            else:
                self.answered.set()
                return
