"""Liveness, readiness, metrics and the OpenAPI document."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from headrace.contract import Job

from ledger.migrate import upgrade
from tests.conftest import Broker, free_port
from tests.integration.api.conftest import ApiServer, HandWorker, api_settings


def test_ready_with_broker_database_and_worker(http: httpx.Client, worker: HandWorker) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    before = http.get("/readyz")
    assert before.status_code == 503
    assert before.json()["checks"]["worker"] == {
        "ok": False,
        "message": "no worker consumes any queue: run 'headrace worker'",
    }
    worker.announce()
    after = http.get("/readyz")
    assert after.status_code == 200
    assert after.json()["ready"] is True
    assert set(after.json()["checks"]) == {"broker", "database", "worker"}


def test_a_workers_entry_that_is_not_readable_is_no_worker(http: httpx.Client, worker: HandWorker) -> None:
    for name, value in (("a", "not json"), ("b", "[]"), ("c", "{}")):
        worker.broker.set(f"headrace:worker:{name}", value)
    assert http.get("/readyz").json()["checks"]["worker"]["ok"] is False


def test_a_database_without_tables_is_told_with_what_to_do(database_url: str, broker_url: str, tmp_path: Path) -> None:
    with ApiServer(api_settings(database_url, broker_url, tmp_path)).running() as server:
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        readiness = httpx.get(f"{server.url}/readyz")
        submission = httpx.post(f"{server.url}/v1/jobs", json={"model": "m", "prompt": "x"})
    assert readiness.status_code == 503
    assert "headrace db upgrade" in readiness.json()["checks"]["database"]["message"]
    assert submission.status_code == 503


def test_it_starts_and_answers_without_broker_and_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ledger.database.RETRY_FOR_S", 0.2)
    nowhere = f"postgresql+psycopg://nobody@127.0.0.1:{free_port()}/none"
    settings = api_settings(nowhere, f"redis://127.0.0.1:{free_port()}/0", tmp_path)
    with ApiServer(settings).running() as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/healthz").status_code == 200
        readiness = http.get("/readyz")
        assert readiness.status_code == 503
        assert not any(check["ok"] for check in readiness.json()["checks"].values())
        for method, path in (("GET", "/v1/jobs"), ("GET", "/v1/jobs/a"), ("GET", "/v1/models")):
            response = http.request(method, path)
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert response.json()["error"]["code"] == "database_unavailable"
        assert http.get("/metrics").status_code == 200


def test_jobs_are_accepted_while_the_broker_is_away(broker: Broker, database_url: str, tmp_path: Path) -> None:
    from ledger import Ledger

    upgrade(database_url)
    hand = HandWorker(Ledger(database_url), broker.url)
    hand.register()
    with ApiServer(api_settings(database_url, broker.url, tmp_path)).running() as server:
        broker.kill()
        with httpx.Client(base_url=server.url, timeout=20) as http:
            job = http.post("/v1/jobs", json={"model": "bytes", "prompt": "x"})
            assert job.status_code == 202
            assert http.get(f"/v1/jobs/{job.json()['id']}?wait=0.2").json()["status"] == "queued"
            assert http.get("/readyz").status_code == 503
            assert http.get("/v1/queues").status_code == 503
    hand.close()


def test_metrics_count_requests_and_jobs(http: httpx.Client, submitted: Job) -> None:
    http.get(f"/v1/jobs/{submitted.id}")
    http.get("/v1/nothing")
    http.request("BREW", "/v1/jobs")
    text = http.get("/metrics").text
    for line in (
        'headrace_api_requests_total{method="POST",route="/v1/jobs",status="202"} 1.0',
        'headrace_api_requests_total{method="GET",route="/v1/jobs/{id}",status="200"} 1.0',
        'headrace_api_requests_total{method="GET",route="unmatched",status="404"} 1.0',
        'headrace_api_request_seconds_count{method="GET",route="/v1/jobs/{id}"} 1.0',
        'headrace_api_jobs_submitted_total{model="bytes"} 1.0',
        'headrace_jobs{model="bytes",status="queued"} 1.0',
    ):
        assert line in text
    assert 'method="other"' in text


def test_a_bug_is_a_plain_500_and_its_text_stays_out_of_log_and_answer(
    http: httpx.Client, submitted: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ledger import Ledger

    secret = f"prompt {submitted.id}!"

    def broken(*_: object) -> None:
        raise KeyError(secret)

    monkeypatch.setattr(Ledger, "get", broken)
    response = http.get(f"/v1/jobs/{submitted.id}")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "KeyError" in caplog.text
    assert secret not in caplog.text + response.text


def test_the_openapi_document_is_complete(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (path, method)
            assert "422" not in operation["responses"], (path, method)
    submit = document["paths"]["/v1/jobs"]["post"]
    body = submit["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/JobRequest"}
    assert {"400", "404", "409", "413", "415", "503"} <= set(submit["responses"])
    references = {part.split('"')[0] for part in str(document).replace("'", '"').split("#/components/schemas/")[1:]}
    assert references <= set(schemas)
    page = http.get("/docs")
    assert page.status_code == 200
    sources = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(sources) >= 2
    for source in sources:
        assert source.startswith("/"), "the page needs no other server"
        assert http.get(source).status_code == 200


def test_the_root_leads_to_the_documentation(http: httpx.Client) -> None:
    answer = http.get("/", follow_redirects=True)
    assert answer.status_code == 200
    assert "Headrace" in answer.text
