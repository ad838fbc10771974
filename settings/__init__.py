"""Settings of every Headrace process.

Precedence: command line, environment (`HEADRACE_...`, nested with `__`), `headrace.yaml`, default.
`REDIS_URL`, `CELERY_BROKER_URL` and `DATABASE_URL` fill a value that nothing else gives.
"""

from __future__ import annotations

import os
import re
from functools import cached_property, lru_cache
from importlib.resources.abc import Traversable
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from headrace import urls
from headrace.contract import Name
from headrace.signing import MIN_KEY_CHARS
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource


def _xdg(variable: str, fallback: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / fallback) / "headrace"


class KVCompressionSettings(BaseModel):
    """Whether long requests keep a share of their keys and values only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float = 1.0
    """The share of a request's tokens that is kept; 1 keeps all."""
    sink_tokens: int = Field(4, ge=0)
    """The first ones, which are always kept."""
    window_tokens: int = Field(256, ge=2)
    """A request holds up to so many tokens more than its share; of the last ones, half of them at least are kept."""

    @field_validator("ratio")
    @classmethod
    def _is_a_share(cls, ratio: float) -> float:
        if not 0 < ratio <= 1:
            raise ValueError(
                f"the share of a request's tokens that is kept can't be {ratio}: set it to a number over 0 and at most"
                " 1, and to 1 to keep all"
            )
        return ratio


class ModelSettings(BaseModel):
    """The model that a worker holds, under the names that people know."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_path: str = "smollm2-135m"
    """A catalogue name, a Hugging Face directory, a GGUF file, a hub id, or `fake` (no weights, for tests)."""
    alias: str | None = None
    """The name that jobs use; by default the last part of `model_path` without its ending."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Devices that the model is divided among. Memory in bytes is of each of them."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    kv_cache_bytes: int | None = Field(None, gt=0)
    """KV pool size; by default all that is left on a GPU, and 1 GiB on a CPU. Never more than is left."""
    max_num_seqs: int = Field(64, ge=1, le=4096)
    max_seq_len: int = Field(4096, ge=1)
    """Most tokens of prompt and output; never more than the model's own context."""
    max_num_batched_tokens: int = Field(1024, ge=1)
    page_size: int = Field(16, ge=4)
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """What keys and values are kept as: `auto` in `dtype`; `int8` and `fp8` in a byte for each number, with scales."""
    kv_compression: KVCompressionSettings = KVCompressionSettings()
    """Whether long requests keep a share of their keys and values only."""
    sliding_window: int | None = Field(None, ge=1)
    """Most tokens that a token sees of those before it; None is what the model was made for."""
    threads: int | None = Field(None, ge=1)
    quantization: Literal["none", "int8", "int4", "gguf"] = "none"
    """Of the layers' weights. `none`: in `dtype`; `int8`, `int4`: in so many bits; `gguf`: a GGUF file's own blocks."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Whose operations torch's models are computed with: `auto` is Triton on a GPU that it runs on, else `torch`."""
    adapters: dict[Name, Path] = {}
    """Low-rank adapters that jobs may name, and their directories (PEFT's); the same for all workers of a model."""
    embeddings: bool = False
    """Whether texts can be made into vectors too, which takes torch on a CPU. A model made for that needs no word."""
    enable_prefix_caching: bool = True
    swap_space_bytes: int = Field(256 * 2**20, ge=0)
    """Host memory for the KV of preempted requests; 0 always computes it again."""
    batch_window_ms: float = Field(0.0, ge=0, le=10_000)
    """How long a new request may wait for companions while the engine is busy; an idle engine starts at once."""
    prefill_share: float = Field(0.25, gt=0, le=1)
    """Share of `max_num_batched_tokens` that prompts may take of a step in which others decode; 1 is no cap."""
    num_speculative_tokens: int = Field(4, ge=0, le=64)
    """Most tokens that are guessed ahead for a request, where that pays; 0 guesses none. The output is the same."""
    enforce_eager: bool = False
    """Whether a GPU gets each operation of a step by itself; else steps of one token a request are recorded once."""
    overlap: bool | Literal["auto"] = "auto"
    """Whether the next step is planned while the device computes; `auto`: on a GPU. The output is the same."""
    speculative_model: str | None = None
    """A smaller model of the same vocabulary that guesses where prompt lookup has nothing, where that pays."""
    aging_s: float = Field(60.0, gt=0)
    """A waiting request rises by one class of priority each time it has waited for this long."""
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    """Shares of the tokens when several tenants wait; 1 for those not named."""
    memory_margin: float = Field(0.2, ge=0, lt=1)
    """Share of the memory left after the weights that admission keeps free."""

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
            raise ValueError(f"{device!r} is no device that serves: name auto, cpu, cuda or cuda:N")
        return device

    @cached_property
    def name(self) -> str:
        """The alias that jobs name and that the queue is called after."""
        return self.alias or Path(self.model_path).name.removesuffix(".gguf").lower()


class WorkerSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    lease_s: float = Field(10.0, gt=0, le=3600)
    """A job whose worker hasn't renewed its claim for this long is taken over."""
    drain_s: float = Field(25.0, ge=0)
    """After SIGTERM, running jobs have this long to finish; the rest is handed back."""
    metrics_host: str = "127.0.0.1"
    """Where the worker serves its metrics; `0.0.0.0` for a scraper on another host."""
    metrics_port: int = Field(9808, ge=0, le=65535)
    """0 picks a free port."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ApiSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    auth: Literal["auto", "keys", "none"] = "auto"
    """Whether requests need an API key; `auto`: unless `host` is the loopback, which only this machine reaches."""
    max_body_bytes: int = Field(8 * 2**20, ge=1024)
    max_wait_s: float = Field(60.0, ge=0)
    """The longest long-poll; a longer `wait` is cut to it."""
    requests_per_minute: int | None = Field(None, ge=1)
    """Of each tenant, all its keys together, but for those that have a limit of their own."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """The same of tokens: those of a job's prompt, and those that it may generate."""

    @property
    def needs_keys(self) -> bool:
        """Whether a request without a valid API key is refused."""
        return self.auth == "keys" or (self.auth == "auto" and not self.is_local)

    @property
    def is_local(self) -> bool:
        """Whether nobody is asked for a key because only this machine is served."""
        return self.auth == "auto" and is_loopback(self.host)


class QueueSettings(BaseModel):
    """How much may wait. Over a bound the API answers 429; raw Celery messages can't be refused, and aren't counted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_max_jobs: int = Field(100_000, ge=1)
    """Most jobs that may wait for one model."""
    model_max_tokens: int = Field(200_000_000, ge=1)
    """Most tokens, of prompts and of what they may generate, that may wait for one model."""
    tenant_max_jobs: int = Field(50_000, ge=1)
    """Most jobs of one tenant that may wait for one model."""
    tenant_max_tokens: int = Field(100_000_000, ge=1)
    """Most tokens of one tenant's jobs that may wait for one model."""
    window_jobs: int = Field(128, ge=1)
    """Messages of one model and class of priority that the broker holds; tenants take turns at the others' places."""


class RetentionSettings(BaseModel):
    """How long what has ended is kept; `null` keeps it for good. What waits or runs is never removed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    jobs_days: float | None = Field(30.0, gt=0, le=36500)
    """Ended jobs, with their prompts, results and idempotency keys."""
    dead_letters_days: float | None = Field(90.0, gt=0, le=36500)
    """Jobs that used their attempts up."""
    keys_days: float | None = Field(90.0, gt=0, le=36500)
    """API keys that were revoked, or have run out."""
    events_hours: float = Field(1.0, ge=0.05, le=8784)
    """Event streams and Celery results on the broker, after a job's last event; whoever takes a job over reads them."""

    @property
    def events_s(self) -> int:
        """The same in seconds."""
        return round(3600 * self.events_hours)


class RedisTls(BaseModel):
    """How the broker is trusted, and this process to it, where its URL begins with rediss://."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca_file: Path | None = None
    """Certificates (PEM) of who may have signed the server's; by default the system's."""
    cert_file: Path | None = None
    """This process's own certificate (PEM), for a server that asks for one."""
    key_file: Path | None = None
    verify: bool = True
    """Whether the server's certificate has to be valid, and its own."""

    def parameters(self) -> dict[str, str]:
        """What is set, as redis-py's parameters of a URL."""
        files = {"ssl_ca_certs": self.ca_file, "ssl_certfile": self.cert_file, "ssl_keyfile": self.key_file}
        named = {name: str(path) for name, path in files.items() if path is not None}
        return named if self.verify else {"ssl_cert_reqs": "none", **named}


class SettingsFile(YamlConfigSettingsSource):
    """`headrace.yaml`. Raises `yaml.YAMLError` also for what is YAML and holds no settings."""

    def _read_file(self, file_path: Path | Traversable) -> dict[str, Any]:
        try:
            found: object = super()._read_file(file_path)
        except UnicodeDecodeError as error:
            raise yaml.YAMLError(f"it is no UTF-8 text: {error.reason} at byte {error.start}") from None
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise yaml.YAMLError("it must hold settings by their names (`name: value`), and holds something else")
        return found


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        yaml_file="headrace.yaml",
        hide_input_in_errors=True,
    )

    home: Path = Field(default_factory=lambda: _xdg("XDG_DATA_HOME", ".local/share"))
    """Where the embedded services keep their data."""
    cache: Path = Field(default_factory=lambda: _xdg("XDG_CACHE_HOME", ".cache"))
    """Where models are kept."""
    redis_url: SecretStr | None = None
    redis_tls: RedisTls = RedisTls()
    database_url: SecretStr | None = None
    signing_key: Annotated[SecretStr, Field(min_length=MIN_KEY_CHARS)] | None = None
    """Signs Celery messages; a worker that has it refuses those that aren't signed with it."""
    signing_key_previous: Annotated[SecretStr, Field(min_length=MIN_KEY_CHARS)] | None = None
    """A second key that workers accept, while senders change from one to the other."""
    flower_port: int = Field(5555, ge=0, le=65535)
    relay_interval_s: float = Field(0.5, gt=0)
    model: ModelSettings = ModelSettings()
    worker: WorkerSettings = WorkerSettings()
    api: ApiSettings = ApiSettings()
    queue: QueueSettings = QueueSettings()
    retention: RetentionSettings = RetentionSettings()

    @cached_property
    def broker_url(self) -> str:
        """Raises `headrace.urls.BadUrl`."""
        given = None if self.redis_url is None else self.redis_url.get_secret_value()
        fallback = os.environ.get("REDIS_URL") or os.environ.get("CELERY_BROKER_URL")
        url = (fallback or "redis://127.0.0.1:6379/0") if given is None else given
        return urls.broker(url, self.redis_tls.parameters())

    @cached_property
    def ledger_url(self) -> str:
        """Raises `headrace.urls.BadUrl`."""
        if self.database_url is not None:
            return urls.canonical(self.database_url.get_secret_value())
        return urls.canonical(os.environ.get("DATABASE_URL") or f"sqlite:///{self.home / 'headrace.sqlite3'}")

    @property
    def signing_secret(self) -> str | None:
        """The key that messages are signed with."""
        return None if self.signing_key is None else self.signing_key.get_secret_value()

    @property
    def accepted_secrets(self) -> tuple[str, ...]:
        """The keys whose signatures count; none: signatures aren't asked for."""
        if self.signing_key is None:
            return ()
        keys = (self.signing_key, self.signing_key_previous)
        return tuple(key.get_secret_value() for key in keys if key is not None)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, SettingsFile(settings_cls)


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()


def settings_with(**overrides: Any) -> Settings:
    """The settings of this process with values from the command line; None leaves a value as it is."""
    return Settings(**{key: value for key, value in overrides.items() if value is not None})
