"""Submitting, reading, listing and stopping jobs over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from headrace.contract import Job, JobStatus
from headrace.tracing import EXAMPLE, trace_id
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from settings import QueueSettings, Settings
from tests.integration.api.conftest import MAX_SEQ_LEN, ApiServer, HandWorker

BODY = {"model": "bytes", "prompt": "hi", "max_tokens": 4}


def error(response: httpx.Response) -> dict[str, str | None]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, str | None] = body["error"]
    return found


class TestSubmit:
    def test_it_is_accepted_with_its_urls(self, http: httpx.Client) -> None:
        response = http.post("/v1/jobs", json={**BODY, "metadata": {"a": "b"}, "priority": "high", "tenant": "t1"})
        job = response.json()
        assert response.status_code == 202
        assert response.headers["location"] == job["urls"]["self"] == f"/v1/jobs/{job['id']}"
        assert (job["status"], job["priority"], job["tenant"], job["metadata"]) == ("queued", "high", "t1", {"a": "b"})
        assert http.get(job["urls"]["self"]).json() == job
        assert http.post(job["urls"]["cancel"]).json()["status"] == "cancelled"
        assert http.post(job["urls"]["retry"]).json()["status"] == "queued"

    def test_the_same_key_gives_the_same_job(self, http: httpx.Client) -> None:
        first = http.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k"})
        again = http.post("/v1/jobs", json={**BODY, "idempotency_key": "k"})
        assert first.json()["id"] == again.json()["id"]
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"

    def test_the_same_key_with_another_body_is_a_conflict(self, http: httpx.Client) -> None:
        http.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k"})
        response = http.post("/v1/jobs", json={**BODY, "max_tokens": 5}, headers={"Idempotency-Key": "k"})
        assert response.status_code == 409
        assert error(response)["param"] == "idempotency_key"

    def test_keys_belong_to_their_tenants(self, http: httpx.Client) -> None:
        ids = {http.post("/v1/jobs", json={**BODY, "idempotency_key": "k", "tenant": t}).json()["id"] for t in "ab"}
        assert len(ids) == 2

    def test_two_different_keys_are_refused(self, http: httpx.Client) -> None:
        response = http.post("/v1/jobs", json={**BODY, "idempotency_key": "a"}, headers={"Idempotency-Key": "b"})
        assert response.status_code == 400
        assert error(response)["param"] == "idempotency_key"

    def test_the_callers_trace_is_kept(self, http: httpx.Client) -> None:
        job = http.post("/v1/jobs", json=BODY, headers={"traceparent": EXAMPLE}).json()
        assert job["traceparent"] == EXAMPLE
        assert http.get("/v1/jobs").json()["data"][0]["traceparent"] == EXAMPLE
        assert http.post("/v1/jobs", json=BODY).json()["traceparent"] is None

    def test_where_requests_are_spans_the_one_that_serves_it_is_kept(
        self, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider())
        kept = http.post("/v1/jobs", json=BODY, headers={"traceparent": EXAMPLE}).json()["traceparent"]
        assert kept != EXAMPLE
        assert trace_id(kept) == trace_id(EXAMPLE)
        assert http.post("/v1/jobs", json={**BODY, "traceparent": EXAMPLE}).json()["traceparent"] == EXAMPLE

    def test_fifty_posts_with_one_key_make_one_job(self, http: httpx.Client, worker: HandWorker) -> None:
        """Learned from llm-d-async: a repeated submission must not run twice."""

        def post(_: int) -> str:
            response = http.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "one"})
            assert response.status_code == 202, response.text
            return str(response.json()["id"])

        with ThreadPoolExecutor(50) as pool:
            ids = set(pool.map(post, range(50)))
        assert len(ids) == 1
        assert worker.wait_for_submitted() == [*ids]

    def test_a_deadline_in_the_past_is_refused(self, http: httpx.Client) -> None:
        past = (datetime.now(UTC) - timedelta(seconds=5)).isoformat()
        response = http.post("/v1/jobs", json={**BODY, "deadline": past})
        assert response.status_code == 400
        assert error(response)["param"] == "deadline"

    def test_an_unknown_model_is_refused_with_the_known_ones(self, http: httpx.Client, worker: HandWorker) -> None:
        response = http.post("/v1/jobs", json={**BODY, "model": "nope"})
        assert response.status_code == 404
        assert error(response)["code"] == "model_not_found"
        assert error(response)["param"] == "model"
        assert "known models: bytes" in str(error(response)["message"])

    def test_a_model_is_known_as_soon_as_its_worker_has_registered_it(
        self, http: httpx.Client, worker: HandWorker
    ) -> None:
        assert http.post("/v1/jobs", json={**BODY, "model": "late"}).status_code == 404
        worker.register("late")
        assert http.post("/v1/jobs", json={**BODY, "model": "late"}).status_code == 202

    @pytest.mark.parametrize(
        ("fields", "status", "numbers"),
        [
            ({"prompt": "x" * 63, "max_tokens": 500}, 202, ()),
            ({"prompt": "x" * 64, "max_tokens": 0}, 202, ()),
            ({"prompt": "x" * 64, "max_tokens": 1}, 400, ("64", "64")),
            ({"prompt": "\u20ac" * 30}, 400, ("90", "64")),
            ({"prompt": [1] * 65}, 400, ("65", "64")),
            ({"messages": [{"role": "user", "content": "x" * 80}]}, 400, ("83", "64")),
        ],
    )
    def test_the_context_length_is_checked_exactly(
        self, http: httpx.Client, fields: dict[str, object], status: int, numbers: tuple[str, ...]
    ) -> None:
        response = http.post("/v1/jobs", json={"model": "bytes", **fields})
        assert response.status_code == status, response.text
        if status == 400:
            assert error(response)["code"] == "context_length_exceeded"
            assert error(response)["param"] == ("messages" if "messages" in fields else "prompt")
            assert all(number in str(error(response)["message"]) for number in numbers)

    def test_a_template_that_refuses_is_told(self, http: httpx.Client) -> None:
        response = http.post("/v1/jobs", json={"model": "bytes", "messages": [{"role": "tool", "content": "x"}]})
        assert response.status_code == 400
        assert error(response)["code"] == "template_error"
        assert "no tools here" in str(error(response)["message"])

    def test_messages_need_a_chat_model(self, http: httpx.Client, worker: HandWorker) -> None:
        worker.register("base", chat=False)
        response = http.post("/v1/jobs", json={"model": "base", "messages": [{"role": "user", "content": "x"}]})
        assert response.status_code == 400
        assert error(response)["param"] == "messages"

    def test_a_new_revision_is_counted_with_its_own_numbers(self, http: httpx.Client, worker: HandWorker) -> None:
        assert http.get("/v1/models").json()["data"][0]["revision"] == "r1"
        worker.register("bytes", revision="r2")
        worker.register("other")
        assert http.post("/v1/jobs", json={**BODY, "model": "other"}).status_code == 202
        assert {m["id"]: m["revision"] for m in http.get("/v1/models").json()["data"]} == {
            "bytes": "r2",
            "other": "r1",
        }


class TestState:
    def test_a_finished_job_has_its_result_and_timings(
        self, http: httpx.Client, worker: HandWorker, submitted: Job
    ) -> None:
        worker.run(submitted.id, "hel", "lo")
        job = http.get(f"/v1/jobs/{submitted.id}").json()
        assert (job["status"], job["attempt"], job["result"]["text"]) == ("succeeded", 1, "hello")
        assert job["timings"]["total_time_ms"] is not None
        assert job["error"] is None

    def test_a_failed_job_keeps_its_part(self, http: httpx.Client, worker: HandWorker, submitted: Job) -> None:
        worker.run(submitted.id, "hel", status=JobStatus.FAILED)
        job = http.get(f"/v1/jobs/{submitted.id}").json()
        assert job["error"] == {"code": "engine_error", "message": "it broke"}
        assert job["result"]["text"] == "hel"

    def test_cancelling_a_queued_job_ends_it(self, http: httpx.Client, submitted: Job) -> None:
        job = http.post(f"/v1/jobs/{submitted.id}/cancel").json()
        assert (job["status"], job["error"]["code"]) == ("cancelled", "cancelled")

    def test_cancelling_a_running_job_waits_for_its_worker(
        self, http: httpx.Client, worker: HandWorker, submitted: Job
    ) -> None:
        worker.start(submitted.id)
        job = http.post(f"/v1/jobs/{submitted.id}/cancel").json()
        assert (job["status"], job["cancel_requested"]) == ("running", True)
        worker.finish(submitted.id, "part", JobStatus.CANCELLED)
        assert http.post(f"/v1/jobs/{submitted.id}/cancel").json()["status"] == "cancelled"

    @pytest.mark.parametrize("status", [JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.SUCCEEDED])
    def test_only_an_end_without_success_is_retried(
        self, http: httpx.Client, worker: HandWorker, submitted: Job, status: JobStatus
    ) -> None:
        if status is not JobStatus.QUEUED:
            worker.start(submitted.id)
        if status is JobStatus.SUCCEEDED:
            worker.finish(submitted.id, "x")
        response = http.post(f"/v1/jobs/{submitted.id}/retry")
        assert response.status_code == 409
        assert error(response)["code"] == "wrong_state"
        assert http.get(f"/v1/jobs/{submitted.id}").json()["status"] == status


class TestPages:
    def test_pages_walk_all_jobs_newest_first(self, http: httpx.Client) -> None:
        made = [http.post("/v1/jobs", json=BODY).json()["id"] for _ in range(7)]
        seen: list[str] = []
        after = None
        while True:
            page = http.get("/v1/jobs", params={"limit": 3, **({"after": after} if after else {})}).json()
            seen += [job["id"] for job in page["data"]]
            assert page["first_id"] == page["data"][0]["id"]
            assert all(job["urls"]["self"].endswith(job["id"]) for job in page["data"])
            after = page["last_id"]
            if not page["has_more"]:
                break
        assert seen == made[::-1]

    def test_filters(self, http: httpx.Client, worker: HandWorker) -> None:
        worker.register("other")
        ids = {
            (model, tenant): http.post("/v1/jobs", json={**BODY, "model": model, "tenant": tenant}).json()["id"]
            for model in ("bytes", "other")
            for tenant in ("a", "b")
        }
        http.post(f"/v1/jobs/{ids['other', 'b']}/cancel")

        def listed(**params: str) -> set[str]:
            return {job["id"] for job in http.get("/v1/jobs", params=params).json()["data"]}

        assert listed(model="bytes") == {ids["bytes", "a"], ids["bytes", "b"]}
        assert listed(tenant="a") == {ids["bytes", "a"], ids["other", "a"]}
        assert listed(status="cancelled") == {ids["other", "b"]}
        assert listed(status="queued", model="other", tenant="a") == {ids["other", "a"]}
        assert listed(model="nobody") == set()

    def test_queues_count_by_model(self, http: httpx.Client, worker: HandWorker, submitted: Job) -> None:
        worker.announce("w1")
        worker.announce("w2", "idle")
        queues = {queue["model"]: queue for queue in http.get("/v1/queues").json()["data"]}
        assert queues["bytes"]["jobs"]["queued"] == 1
        assert queues["bytes"]["waiting_tokens"] == MAX_SEQ_LEN
        assert queues["bytes"]["backlog_s"] is None
        assert queues["idle"]["backlog_s"] == 0
        assert queues["bytes"]["jobs"]["failed"] == 0
        assert queues["bytes"]["workers"] == ["w1"]
        assert queues["idle"]["workers"] == ["w2"]


def test_a_full_queue_is_answered_with_429_and_a_time(settings: Settings, worker: HandWorker) -> None:
    """A queue is bounded; who comes too much is told how much waits, and when to come again."""
    bounded = settings.model_copy(update={"queue": QueueSettings(model_max_jobs=1)})
    with ApiServer(bounded).running() as server, httpx.Client(base_url=server.url, timeout=20) as http:
        body = {"model": "bytes", "prompt": "hi", "idempotency_key": "k"}
        assert http.post("/v1/jobs", json=body).status_code == 202
        refused = http.post("/v1/jobs", json={"model": "bytes", "prompt": "hi"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert http.post("/v1/jobs", json=body).headers["idempotent-replayed"] == "true"
        assert http.post("/v1/jobs", json={"model": "bytes", "prompt": ""}).status_code == 400
