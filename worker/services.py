"""What a worker is made of besides Celery: engine, ledger, writer, telemetry, metrics; started and stopped in order."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

import redis
from celery.utils.log import get_logger
from headrace.contract import ModelCard

from engine.compression import KVCompression
from engine.config import EngineConfig
from ledger.contract import LedgerProtocol, LedgerUnavailable
from settings import Settings
from worker.draft import PRIORITY_NUMBERS, Identity
from worker.listener import Listener
from worker.liveness import answer_liveness
from worker.metrics import Metrics, serve_metrics
from worker.progress import PATIENCE_S, ProgressReader
from worker.telemetry import Telemetry
from worker.writer import Writer

if TYPE_CHECKING:
    from engine.thread import EngineThread
    from worker.pool import EnginePool

log = get_logger(__name__)

SEND_S = 3.0
"""How long the last events may take to be sent."""
WRITE_S = 2.0
"""How long the last rows may take to be written."""


@dataclass(frozen=True, slots=True)
class Services:
    """The running parts of one worker."""

    model: str
    app: Any
    engine: EngineThread
    ledger: LedgerProtocol
    writer: Writer
    telemetry: Telemetry
    progress: ProgressReader
    metrics: Metrics
    metrics_server: WSGIServer
    owner: str
    identity: Identity
    lease_s: float
    drain_s: float
    max_num_seqs: int

    def info(self) -> dict[str, Any]:
        """What `inspect stats` and Flower show of the worker."""
        now = self.engine.stats()
        return {
            "model": self.model,
            "device": self.identity.device,
            "dtype": self.identity.dtype,
            "model_revision": self.identity.model_revision,
            "adapters": sorted(self.identity.adapters),
            "ledger": "available" if self.writer.available() else "unavailable",
            "metrics_port": self.metrics_server.server_port,
            "engine": {
                "running": now.running,
                "waiting": now.waiting,
                "max_num_seqs": now.max_num_seqs,
                "pages_total": now.pages_total,
                "pages_free": now.pages_free,
                "max_batch_size": now.max_batch_size,
                "steps": now.steps,
                "generation_tokens": now.generation_tokens,
                "drafted_tokens": now.drafted_tokens,
                "accepted_tokens": now.accepted_tokens,
                "preemptions": now.preemptions,
                "swaps": now.swaps,
                "pages_swapped": now.swapped_pages,
                "evictions": now.evictions,
                "cached_tokens": now.cached_tokens,
                "prefix_hit_rate": round(now.prefix_hit_rate, 3),
                "fragmentation": round(now.fragmentation, 3),
                "running_by_priority": _by_name(now.running_by_priority),
                "waiting_by_priority": _by_name(now.waiting_by_priority),
            },
        }

    def stop(self) -> None:
        """Write and send what is left, stop the engine, and check that its memory is whole."""
        parts: list[tuple[str, Callable[[], None]]] = [
            ("the writer", lambda: self.writer.stop(WRITE_S)),
            ("telemetry", lambda: self.telemetry.stop(SEND_S)),
            ("the reader of progress", self.progress.stop),
            ("the engine's check of its memory", self.engine.check),
            ("the engine", self.engine.stop),
            ("the metrics server", self.metrics_server.shutdown),
            ("the metrics server's socket", self.metrics_server.server_close),
            ("the ledger", self.ledger.close),
        ]
        failed = [name for name, stop in parts if not _done(name, stop)]
        if not failed:
            log.info("worker stopped: everything that ended here is recorded")


def _done(name: str, stop: Callable[[], None]) -> bool:
    """Whether a part stopped without an error; one that doesn't keeps no other from it."""
    try:
        stop()
    except Exception:
        log.critical("%s failed as the worker stopped", name, exc_info=True)
        return False
    return True


def _by_name(classes: dict[int, int]) -> dict[str, int]:
    return {priority.value: classes.get(number, 0) for priority, number in PRIORITY_NUMBERS.items()}


def engine_config(settings: Settings) -> EngineConfig:
    """The engine's part of the settings."""
    asked = settings.model
    return EngineConfig(
        model=asked.model_path,
        cache=settings.cache,
        dtype=asked.dtype,
        device=asked.device,
        tensor_parallel_size=asked.tensor_parallel_size,
        max_num_seqs=asked.max_num_seqs,
        max_seq_len=asked.max_seq_len,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        page_size=asked.page_size,
        kv_cache_dtype=asked.kv_cache_dtype,
        kv_compression=KVCompression(**asked.kv_compression.model_dump()),
        sliding_window=asked.sliding_window,
        kv_cache_bytes=asked.kv_cache_bytes,
        gpu_memory_utilization=asked.gpu_memory_utilization,
        threads=asked.threads,
        quantization=asked.quantization,
        kernels=asked.kernels,
        adapters=asked.adapters,
        embeddings=asked.embeddings,
        enable_prefix_caching=asked.enable_prefix_caching,
        swap_space_bytes=asked.swap_space_bytes,
        batch_window_ms=asked.batch_window_ms,
        prefill_share=asked.prefill_share,
        num_speculative_tokens=asked.num_speculative_tokens,
        enforce_eager=asked.enforce_eager,
        overlap=asked.overlap,
        speculative_model=asked.speculative_model,
        aging_s=asked.aging_s,
        tenant_weights=asked.tenant_weights,
        memory_margin=asked.memory_margin,
    )


def open_ledger(url: str) -> LedgerProtocol:
    """The ledger, with its tables made in a database that is new. One that is away is no reason not to start."""
    from ledger import Ledger
    from ledger.migrate import upgrade

    ledger = Ledger(url)
    try:
        has, needs = ledger.revision()
        if has is None:
            upgrade(url)
        elif has != needs:
            raise RuntimeError(f"the database is at revision {has}, this worker needs {needs}: `headrace db upgrade`")
    except LedgerUnavailable as exc:
        log.error("the ledger is unavailable, no job starts before it is back: %s", exc)
    return ledger


def start_services(settings: Settings, app: Any, hostname: str, pool: EnginePool) -> Services:
    """Load the model and start every part; raises with a plain message if one can't start."""
    from engine.model import load_model
    from engine.thread import EngineThread

    config = engine_config(settings)
    log.info("loading model %s", settings.model.model_path)
    model = load_model(config)
    loaded = model.info
    log.info(
        "model %s loaded on %s in %s, revision %s", settings.model.name, loaded.device, loaded.dtype, loaded.revision
    )
    metrics = Metrics(settings.model.name)
    client = redis.Redis.from_url(
        settings.broker_url, socket_timeout=5, socket_connect_timeout=2, socket_keepalive=True
    )
    telemetry = Telemetry(client, metrics, settings.retention.events_s)
    patience = {"socket_timeout": PATIENCE_S, "socket_connect_timeout": PATIENCE_S}
    progress = ProgressReader(redis.Redis.from_url(settings.broker_url, **patience))
    engine = EngineThread(model, config, Listener(pool, telemetry))
    ledger = open_ledger(settings.ledger_url)
    owner = f"{hostname}/{uuid.uuid4().hex[:8]}"
    writer = Writer(
        ledger,
        owner,
        settings.worker.lease_s,
        settings.home / "spool",
        on_lost=lambda lease: pool.post(pool.lose_attempt, lease.job_id, lease.fence),
        on_cancelled=lambda lease: pool.post(pool.cancel_attempt, lease.job_id, lease.fence),
    )
    metrics.watch(engine.stats)
    server = serve_metrics(metrics, settings.worker.metrics_host, settings.worker.metrics_port)
    answer_liveness(server, lambda: pool.liveness.problem(engine.stats(), time.monotonic()))
    info = model.info
    card = ModelCard(
        id=settings.model.name,
        revision=info.revision,
        max_seq_len=engine.max_seq_len,
        vocab_size=info.vocab_size,
        chat=info.text.chat_template is not None,
        adapters=list(info.adapters),
    )
    writer.register(card, info.text.to_bytes())
    for part in (engine, telemetry, progress, writer):
        part.start()
    return Services(
        model=settings.model.name,
        app=app,
        engine=engine,
        ledger=ledger,
        writer=writer,
        telemetry=telemetry,
        progress=progress,
        metrics=metrics,
        metrics_server=server,
        owner=owner,
        identity=Identity(hostname, info.device, info.dtype, info.revision, info.adapters),
        lease_s=settings.worker.lease_s,
        drain_s=settings.worker.drain_s,
        max_num_seqs=settings.model.max_num_seqs,
    )
