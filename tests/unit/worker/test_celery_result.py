"""Results that go with a job's events, as Celery's own backend reads them from a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import celery
import pytest
import redis
from headrace.wire import celery_config

from tests.conftest import Broker
from worker.celery_result import put_result
from worker.failures import JobFailed
from worker.job_stream import Outgoing


@pytest.fixture
def backend(broker: Broker) -> Iterator[Any]:
    app = celery.Celery(set_as_current=False)
    app.conf.update(celery_config(broker.url))
    yield app.backend
    app.backend.client.close()
    app.close()


def put(backend: Any, value: object, state: str, anew: bool = False) -> None:
    out = Outgoing()
    put_result(out, backend, "t", value, state, anew=anew)
    assert not [answer for answer in out.send(backend.client) if isinstance(answer, Exception)]


@pytest.mark.parametrize(("value", "state"), [({"text": "ä"}, "SUCCESS"), (JobFailed("why"), "FAILURE")])
@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
def test_is_what_the_backend_itself_would_store(backend: Any, value: object, state: str) -> None:
    backend.store_result("t", value, state)
    [stored] = [backend.decode(backend.client.get(key)) for key in backend.client.keys("*")]
    backend.client.flushdb()
    put(backend, value, state)
    [ours] = [backend.decode(backend.client.get(key)) for key in backend.client.keys("*")]
    assert ours | {"date_done": None} == stored | {"date_done": None}
    assert 0 < backend.client.ttl(backend.get_key_for_task("t")) <= 3600


def test_what_the_ledger_knows_nothing_of_replaces_no_result(backend: Any) -> None:
    put(backend, {"text": "x"}, "SUCCESS")
    put(backend, JobFailed("refused"), "FAILURE", anew=True)
    assert backend.get_state("t") == "SUCCESS"


def test_whoever_waits_is_told(backend: Any) -> None:
    client: redis.Redis = backend.client
    with client.pubsub(ignore_subscribe_messages=True) as told:  # type: ignore[no-untyped-call]
        told.subscribe(backend.get_key_for_task("t"))
        told.get_message(timeout=1)
        put(backend, {"text": "x"}, "SUCCESS")
        message = told.get_message(timeout=5)
    assert message is not None
    assert backend.decode(message["data"])["result"] == {"text": "x"}
