"""The application's configuration."""

from __future__ import annotations

from headrace.wire import celery_config

from settings import Settings
from worker.app import POOL, make_app


def test_an_application_serves_one_model() -> None:
    app = make_app(Settings(model={"model_path": "/models/Some-Model.gguf", "max_num_seqs": 7}))
    assert list(app.amqp.queues) == ["headrace.some-model"]
    assert app.conf.worker_pool == POOL
    assert app.conf.worker_concurrency == 7
    assert app.conf.worker_prefetch_multiplier == 1
    assert app.conf.task_acks_late


def test_transport_options_are_those_of_every_process() -> None:
    settings = Settings(redis_url="redis://broker:6379/0")
    app = make_app(settings)
    shared = celery_config(settings.broker_url)
    assert app.conf.broker_transport_options == shared["broker_transport_options"]
    assert app.conf.accept_content == ["json"]


def test_our_tasks_deliveries_are_handled_by_us() -> None:
    app = make_app(Settings())
    app.loader.import_default_modules()
    from worker.tasks import generate

    assert generate.acks_late
    assert generate.Request == "worker.message:JobMessage"
