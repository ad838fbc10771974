"""Limits on requests and tokens a minute, counted on the broker so that every API process knows them.

A key with a limit of its own is counted by itself; all other keys of a tenant together have the settings' limits, and
so has everybody together where no keys are asked for. The minute slides.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import redis
import redis.asyncio
from headrace.counting import counted
from headrace.validation import invalid
from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from api.errors import RateLimited
from ledger.credentials import ApiKey
from settings import ApiSettings

log = logging.getLogger(__name__)

PREFIX = "headrace:rate"
AWAY_S = 5.0
"""How long a broker that could not count isn't asked again; this process counts by itself meanwhile."""


@dataclass(frozen=True, slots=True)
class Limit:
    """So many `unit`s (`requests` or `tokens`) a minute, for whoever `sharer` names."""

    unit: str
    amount: int
    sharer: str

    @property
    def item(self) -> RateLimitItemPerMinute:
        return RateLimitItemPerMinute(self.amount, namespace=PREFIX)


class Rates:
    """Counts what callers use of their limits."""

    def __init__(self, broker: redis.asyncio.Redis, broker_url: str, settings: ApiSettings) -> None:
        self._settings = settings
        storage = RedisStorage(
            broker_url,
            implementation="redispy",
            key_prefix=PREFIX,
            connection_pool=broker.connection_pool,  # type: ignore[arg-type]  # its type says less than it takes
        )
        self._shared = SlidingWindowCounterRateLimiter(storage)
        self._alone: SlidingWindowCounterRateLimiter | None = None
        self._shared_from_s = float("-inf")

    async def request(self, key: ApiKey | None) -> dict[str, str]:
        """Count one request; the headers that tell what is left. Raises RateLimited."""
        own = None if key is None else key.requests_per_minute
        limit = self._limit("requests", key, own, self._settings.requests_per_minute)
        return {} if limit is None else await self._use(limit, 1)

    async def tokens(self, key: ApiKey | None, tokens: int) -> dict[str, str]:
        """Count a job's tokens: those of its prompt, and those that it may generate. Raises RateLimited.

        Raises BadRequest for a job that is larger than a whole minute's tokens.
        """
        own = None if key is None else key.tokens_per_minute
        limit = self._limit("tokens", key, own, self._settings.tokens_per_minute)
        if limit is None:
            return {}
        if tokens > limit.amount:
            asked = counted(tokens, "token")
            message = f"the job may take {asked}, and {limit.amount} a minute are allowed: lower max_tokens"
            raise invalid(message, "max_tokens", "over_token_limit")
        return await self._use(limit, tokens)

    def _limit(self, unit: str, key: ApiKey | None, own: int | None, common: int | None) -> Limit | None:
        if key is not None and own is not None:
            return Limit(unit, own, f"key:{key.id}")
        if common is None:
            return None
        return Limit(unit, common, "everybody" if key is None else f"tenant:{key.tenant}")

    async def _use(self, limit: Limit, cost: int) -> dict[str, str]:
        if time.monotonic() >= self._shared_from_s:
            try:
                return await self._count(self._shared, limit, cost)
            except (redis.RedisError, OSError) as error:
                self._shared_from_s = time.monotonic() + AWAY_S
                log.warning("the broker can't count requests (%s): this process counts its own", type(error).__name__)
        if self._alone is None:
            self._alone = SlidingWindowCounterRateLimiter(MemoryStorage())
        return await self._count(self._alone, limit, cost)

    async def _count(self, limiter: SlidingWindowCounterRateLimiter, limit: Limit, cost: int) -> dict[str, str]:
        allowed = await limiter.hit(limit.item, limit.unit, limit.sharer, cost=cost)
        window = await limiter.get_window_stats(limit.item, limit.unit, limit.sharer)
        pause_s = max(1.0, window.reset_time - time.time())
        headers = {
            f"X-RateLimit-Limit-{limit.unit.title()}": str(limit.amount),
            f"X-RateLimit-Remaining-{limit.unit.title()}": str(max(0, window.remaining)),
            f"X-RateLimit-Reset-{limit.unit.title()}": f"{math.ceil(pause_s)}s",
        }
        if not allowed:
            message = f"more than {limit.amount} {limit.unit} a minute; try again in {math.ceil(pause_s)} s"
            raise RateLimited(message, headers, pause_s)
        return headers
