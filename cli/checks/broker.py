"""The broker: reachable, keeps what it is given, and all its clients agree."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import redis
from headrace.counting import counted
from headrace.urls import BadUrl, masked
from headrace.wire import QUEUE_PREFIX, VISIBILITY_TIMEOUT_S, WORKER_KEY_PREFIX, celery_config

from cli.checks.finding import Finding, Level, Reporter
from cli.output import first_line
from settings import Settings, is_loopback

broker = Reporter("broker")
MEMORY_ALARM = 0.7
MAX_CLOCK_OFFSET_S = 2.0
INSPECT_TIMEOUT_S = 1.0


def check_broker(settings: Settings) -> Iterator[Finding]:
    """Everything about the broker; one failure if it can't be reached."""
    try:
        url = settings.broker_url
    except BadUrl as error:
        yield broker.fail(f"the broker's URL: {error}", "correct HEADRACE_REDIS_URL (or REDIS_URL)")
        return
    try:
        with redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3, decode_responses=True) as client:
            yield from _findings(client, url, signs=settings.signing_secret is not None)
    except (redis.RedisError, ValueError) as error:
        yield broker.fail(
            f"no broker answers at {masked(url)}: {first_line(error)}",
            "start it, or set HEADRACE_REDIS_URL (or REDIS_URL); `headrace up` brings its own",
        )


def _findings(client: redis.Redis, url: str, signs: bool) -> Iterator[Finding]:
    sent_s = time.time()
    seconds, microseconds = client.time()
    offset_s = seconds + microseconds / 1e6 - (sent_s + time.time()) / 2
    info: dict[str, Any] = client.info()
    name = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    version = info.get("valkey_version") or info["redis_version"]
    yield broker.ok(f"{name} {version} answers at {masked(url)}")
    yield from _encryption(url)
    yield clock(broker, "the broker", offset_s)
    role = _role(info)
    yield role
    if role.level is Level.FAIL:
        return
    yield _eviction(client)
    yield _memory(info)
    yield _persistence(info)
    yield _unrenewed(client)
    yield from _visibility(url)
    yield _workers(client)
    seen = _announced(client)
    yield from _signatures(seen, signs)
    yield from _unserved(client, {str(worker.get("model")) for worker in seen.values()})


def _encryption(url: str) -> Iterator[Finding]:
    parts = urlsplit(url)
    if parts.scheme == "redis" and not is_loopback(parts.hostname or "localhost"):
        yield broker.warn(
            "the broker is on another machine and reached without TLS: prompts and passwords can be read on the way",
            "use rediss:// and HEADRACE_REDIS_TLS__CA_FILE, unless the network between is your own",
        )


def clock(area: Reporter, whose: str, offset_s: float) -> Finding:
    """Whether a clock agrees with this host's."""
    if abs(offset_s) <= MAX_CLOCK_OFFSET_S:
        return area.ok(f"the clock of {whose} differs from this host's by {abs(offset_s) * 1000:.0f} ms")
    return area.warn(
        f"the clock of {whose} is {offset_s:+.1f} s off this host's",
        "run NTP on every host: times in results and the age of messages are read across hosts",
    )


def _eviction(client: redis.Redis) -> Finding:
    try:
        policy = client.config_get("maxmemory-policy").get("maxmemory-policy")
    except redis.ResponseError:
        return broker.warn(
            "the memory policy can't be read (CONFIG is not allowed)", "make sure that maxmemory-policy is noeviction"
        )
    if policy == "noeviction":
        return broker.ok("memory policy noeviction: no queued message is thrown away")
    return broker.fail(
        f"memory policy {policy}: under memory pressure the broker throws queued messages away",
        "set `maxmemory-policy noeviction`, and keep caches on another server",
    )


def _role(info: dict[str, Any]) -> Finding:
    if info.get("role") == "master":
        return broker.ok("a primary: it can be written")
    return broker.fail(
        "this is a replica that only reads: no job can be published and no event sent",
        "point HEADRACE_REDIS_URL (or REDIS_URL) at the primary, or promote this one (`REPLICAOF NO ONE`)",
    )


def _memory(info: dict[str, Any]) -> Finding:
    used, most = int(info["used_memory"]), int(info.get("maxmemory", 0))
    if most == 0:
        return broker.ok(f"{used / 2**20:.0f} MiB in use, no limit set")
    text = f"{used / 2**20:.0f} of {most / 2**20:.0f} MiB in use"
    if used < MEMORY_ALARM * most:
        return broker.ok(text)
    return broker.warn(
        text, "a full broker refuses new jobs and kills consumers: raise maxmemory, or find what fills it"
    )


def _persistence(info: dict[str, Any]) -> Finding:
    if int(info.get("aof_enabled", 0)):
        if info.get("aof_last_write_status", "ok") == "ok":
            return broker.ok("append-only file: queued messages survive a restart")
        return broker.fail("the append-only file can't be written", "look at the broker's disk and its log")
    return broker.warn(
        "no append-only file: a restart of the broker empties the queues",
        "set `appendonly yes`; until then the ledger publishes lost jobs again, and raw Celery messages are lost",
    )


def _unrenewed(client: redis.Redis) -> Finding:
    """The age of the oldest unacknowledged message: a live worker renews its own every quarter of the limit."""
    oldest = client.zrange("unacked_index", 0, 0, withscores=True)
    if not oldest:
        return broker.ok("no message waits for an acknowledgement")
    age_s = time.time() - float(oldest[0][1])
    if age_s <= VISIBILITY_TIMEOUT_S:
        return broker.ok(f"every unacknowledged message was renewed within {age_s:.0f} s")
    return broker.warn(
        f"a message has gone unrenewed for {age_s:.0f} s, past the visibility timeout of {VISIBILITY_TIMEOUT_S} s",
        "its worker died and none has run since: start one, and it is handed out again",
    )


def _visibility(url: str) -> Iterator[Finding]:
    """Ask every worker for its visibility timeout. An unequal one makes running jobs start twice."""
    from celery import Celery

    app = Celery(set_as_current=False)
    app.conf.update(celery_config(url))
    try:
        replies = app.control.broadcast("conf", reply=True, timeout=INSPECT_TIMEOUT_S) or []
    finally:
        app.close()
    for name, count in sorted(Counter(name for reply in replies for name in reply).items()):
        if count > 1:
            yield broker.fail(
                f"{count} workers are called {name}", "give each a `--name` of its own: it is what they are known by"
            )
    answers = {name: conf for reply in replies for name, conf in reply.items()}
    for name, conf in sorted(answers.items()):
        theirs = (conf.get("broker_transport_options") or {}).get("visibility_timeout", 3600)
        if theirs == VISIBILITY_TIMEOUT_S:
            yield broker.ok(f"{name}: visibility timeout {theirs} s, as here")
        else:
            yield broker.fail(
                f"{name}: visibility timeout {theirs} s, but {VISIBILITY_TIMEOUT_S} s here; running jobs start twice",
                "run the same version everywhere, and give other Celery apps on this broker another database number",
            )


def _workers(client: redis.Redis) -> Finding:
    names = sorted(key.removeprefix(WORKER_KEY_PREFIX) for key in client.scan_iter(WORKER_KEY_PREFIX + "*"))
    if names:
        return broker.ok(f"consuming: {', '.join(names)}")
    return broker.warn("no worker consumes", "start one: `headrace worker`")


def _announced(client: redis.Redis) -> dict[str, dict[str, Any]]:
    """What each worker that consumes says of itself."""
    values = {key: client.get(key) for key in client.scan_iter(WORKER_KEY_PREFIX + "*")}
    return {key.removeprefix(WORKER_KEY_PREFIX): json.loads(value) for key, value in sorted(values.items()) if value}


def _signatures(seen: dict[str, dict[str, Any]], signs: bool) -> Iterator[Finding]:
    """Workers that refuse what is sent with these settings, or run what anybody sends."""
    asking = [name for name, worker in seen.items() if worker.get("signed")]
    trusting = [name for name in seen if name not in asking]
    if asking and not signs:
        yield broker.warn(
            f"{', '.join(asking)} refuses messages that aren't signed, and these settings have no key: an API that is "
            "started with them sends messages that are refused, and their jobs stay queued",
            "set HEADRACE_SIGNING_KEY to the same for every process",
        )
    if trusting and signs:
        yield broker.warn(
            f"{', '.join(trusting)} runs messages that aren't signed, although these settings have a key",
            "set HEADRACE_SIGNING_KEY to the same for every process",
        )


def _unserved(client: redis.Redis, served: set[str]) -> Iterator[Finding]:
    """Messages on queues that nobody reads: a producer's typing error, or a worker that is missing."""
    waiting: Counter[str] = Counter()
    for key in client.scan_iter(QUEUE_PREFIX + "*", _type="list"):
        waiting[key.removeprefix(QUEUE_PREFIX).partition("\x06\x16")[0]] += client.llen(key)
    for model in sorted(waiting.keys() - served):
        yield broker.warn(
            f"{counted(waiting[model], 'message waits', 'messages wait')} for the model {model!r}, "
            "and no worker holds it",
            f"start one: `headrace worker --model {model}`; or correct the producer's model and queue",
        )
