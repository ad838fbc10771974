"""The application's configuration."""

from __future__ import annotations

import redis
from celery.utils.nodenames import gethostname
from headrace.wire import celery_config, worker_key

from settings import Settings
from tests.conftest import free_port
from worker.app import POOL, SILENCE_S, free_node_name, make_app


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
    silence = {"socket_timeout": SILENCE_S, "socket_connect_timeout": SILENCE_S}
    assert app.conf.broker_transport_options == {**shared["broker_transport_options"], **silence}
    assert app.conf.accept_content == ["json"]


def test_our_tasks_deliveries_are_handled_by_us() -> None:
    app = make_app(Settings())
    app.loader.import_default_modules()
    from worker.tasks import generate

    assert generate.acks_late
    assert generate.Request == "worker.message:JobMessage"


def test_a_second_worker_on_a_host_gets_a_name_of_its_own(broker_url: str) -> None:
    settings = Settings(redis_url=broker_url, model={"model_path": "fake"})
    host = gethostname()
    assert free_node_name(settings) == f"fake@{host}"
    with redis.Redis.from_url(broker_url) as client:
        client.set(worker_key(f"fake@{host}"), "{}")
    assert free_node_name(settings) == f"fake-2@{host}"


def test_a_worker_has_a_name_though_the_broker_is_away() -> None:
    settings = Settings(redis_url=f"redis://127.0.0.1:{free_port()}/0", model={"model_path": "fake"})
    assert free_node_name(settings) == f"fake@{gethostname()}"
