"""Who may do what at the door: no key, a wrong one, too small a one, another tenant's."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from headrace import AsyncClient, Client, Forbidden, NotFound, Unauthorized

from api.app import create_app
from ledger import Ledger
from ledger.credentials import IssuedKey, NewKey, Scope
from settings import Settings
from tests.integration.api.conftest import ApiServer, HandWorker

PUBLIC = {("get", "/healthz"), ("get", "/readyz")}
"""What needs no key: load balancers and orchestrators have none."""
BODY = {"model": "bytes", "prompt": "hi"}


@pytest.fixture(scope="module")
def worker(module_settings: Settings) -> Iterator[HandWorker]:
    hand = HandWorker(Ledger(module_settings.ledger_url), module_settings.broker_url)
    hand.register()
    yield hand
    hand.close()


@pytest.fixture(scope="module")
def server(module_settings: Settings, worker: HandWorker) -> Iterator[ApiServer]:
    """One server for all tests here; each has tenants of its own."""
    api = module_settings.api.model_copy(update={"auth": "keys"})
    with ApiServer(module_settings.model_copy(update={"api": api})).running() as running:
        yield running


@pytest.fixture
def shop_name() -> str:
    return f"shop-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def rival_name() -> str:
    return f"rival-{uuid.uuid4().hex[:8]}"


@dataclass
class Keys:
    """Makes keys, and clients that use them."""

    server: ApiServer
    worker: HandWorker

    def new(self, tenant: str = "shop", *scopes: Scope, **more: Any) -> IssuedKey:
        asked = {"scopes": frozenset(scopes)} if scopes else {}
        return self.worker.ledger.keys.create(NewKey(tenant, **asked, **more))

    def http(self, token: str) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, headers={"Authorization": f"Bearer {token}"}, timeout=20)


@pytest.fixture
def keys(server: ApiServer, worker: HandWorker) -> Keys:
    return Keys(server, worker)


@pytest.fixture
def shop(keys: Keys, shop_name: str) -> Iterator[httpx.Client]:
    with keys.http(keys.new(shop_name).token) as client:
        yield client


@pytest.fixture
def rival(keys: Keys, rival_name: str) -> Iterator[httpx.Client]:
    with keys.http(keys.new(rival_name).token) as client:
        yield client


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    """Every route, from the description that clients get."""
    described = create_app(Settings()).openapi()["paths"]
    return [(method, path, operation) for path, methods in described.items() for method, operation in methods.items()]


GUARDED = [(method, path) for method, path, _ in operations() if (method, path) not in PUBLIC]
OF_A_JOB = [(method, path) for method, path in GUARDED if "{id}" in path]


def test_every_route_says_what_key_it_needs() -> None:
    for method, path, operation in operations():
        if (method, path) in PUBLIC:
            assert "security" not in operation
        else:
            assert "api_key" in operation["security"][0], f"{method} {path} is open to everybody"
            assert {"401", "403"} <= set(operation["responses"])
    assert {("post", "/v1/jobs/{id}/cancel"), ("get", "/v1/jobs/{id}/events"), ("get", "/metrics")} <= set(GUARDED)


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_no_route_answers_without_a_key(server: ApiServer, shop: httpx.Client, method: str, path: str) -> None:
    job_id = shop.post("/v1/jobs", json=BODY).json()["id"]
    url = server.url + path.replace("{id}", job_id)
    for header in ({}, {"Authorization": "Bearer hr_0123456789abcdef_" + "x" * 43}, {"Authorization": "Basic eDp5"}):
        response = httpx.request(method, url, headers=header, json=BODY if path == "/v1/jobs" else None, timeout=20)
        assert response.status_code == 401, response.text
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
        assert job_id not in response.text


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_no_route_answers_a_key_that_has_none_of_its_scopes(keys: Keys, method: str, path: str) -> None:
    scope = Scope.READ if path == "/metrics" else Scope.METRICS
    with keys.http(keys.new("shop", scope).token) as http:
        response = http.request(method, path.replace("{id}", "0"))
    assert response.status_code == 403, response.text
    assert response.json()["error"]["code"] == "missing_scope"
    assert response.json()["error"]["message"] in {f"this API key lacks the scope {asked.value}" for asked in Scope}


@pytest.mark.parametrize(("method", "path"), OF_A_JOB)
def test_another_tenants_job_is_not_there(
    shop: httpx.Client, rival: httpx.Client, keys: Keys, method: str, path: str
) -> None:
    job_id = shop.post("/v1/jobs", json=BODY).json()["id"]
    theirs, missing = (rival.request(method, path.replace("{id}", i)) for i in (job_id, "no-such-job"))
    assert theirs.status_code == missing.status_code == 404
    assert theirs.text.replace(job_id, "no-such-job") == missing.text
    assert keys.worker.ledger.get(job_id).status.value == "queued"


def test_a_list_and_the_queues_hold_the_callers_jobs_alone(
    shop: httpx.Client, rival: httpx.Client, shop_name: str, rival_name: str
) -> None:
    mine = shop.post("/v1/jobs", json=BODY).json()
    assert mine["tenant"] == shop_name
    theirs = rival.post("/v1/jobs", json=BODY).json()
    assert [job["id"] for job in shop.get("/v1/jobs").json()["data"]] == [mine["id"]]
    assert [job["id"] for job in rival.get("/v1/jobs", params={"tenant": rival_name}).json()["data"]] == [theirs["id"]]
    assert shop.get("/v1/jobs", params={"tenant": rival_name}).status_code == 403
    assert shop.get("/v1/jobs", params={"after": theirs["id"]}).status_code == 400
    [queue] = shop.get("/v1/queues").json()["data"]
    assert queue["jobs"]["queued"] == 1


def test_a_job_is_submitted_for_the_keys_tenant_or_not_at_all(shop: httpx.Client, shop_name: str) -> None:
    assert shop.post("/v1/jobs", json={**BODY, "tenant": shop_name}).json()["tenant"] == shop_name
    refused = shop.post("/v1/jobs", json={**BODY, "tenant": "rival"})
    assert refused.status_code == 403
    assert refused.json()["error"]["param"] == "tenant"


def test_idempotency_keys_of_two_tenants_do_not_meet(shop: httpx.Client, rival: httpx.Client) -> None:
    made = [http.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": "k"}) for http in (shop, rival)]
    assert [response.status_code for response in made] == [202, 202]
    assert made[0].json()["id"] != made[1].json()["id"]


def test_an_admin_sees_and_does_everything(keys: Keys, shop: httpx.Client, shop_name: str) -> None:
    job_id = shop.post("/v1/jobs", json=BODY).json()["id"]
    with keys.http(keys.new("ops", Scope.ADMIN).token) as admin:
        assert admin.get(f"/v1/jobs/{job_id}").json()["tenant"] == shop_name
        assert admin.post("/v1/jobs", json={**BODY, "tenant": "rival"}).json()["tenant"] == "rival"
        assert admin.post("/v1/jobs", json=BODY).json()["tenant"] == "ops"
        assert {job["tenant"] for job in admin.get("/v1/jobs").json()["data"]} >= {shop_name, "rival", "ops"}
        assert admin.get("/metrics").status_code == 200
        assert admin.post(f"/v1/jobs/{job_id}/cancel").json()["status"] == "cancelled"


def test_probes_need_no_key(server: ApiServer) -> None:
    assert httpx.get(server.url + "/healthz").status_code == 200
    assert httpx.get(server.url + "/readyz").status_code == 503  # no worker consumes


def test_a_new_key_works_at_once_and_a_revoked_one_ends_within_seconds(keys: Keys) -> None:
    issued = keys.new()
    with keys.http(issued.token) as http:
        assert http.get("/v1/jobs").status_code == 200
        keys.worker.ledger.keys.revoke(issued.key.id)
        began_s = time.monotonic()
        while http.get("/v1/jobs").status_code == 200:
            assert time.monotonic() - began_s < 10
            time.sleep(0.05)
        assert http.get("/v1/jobs").json()["error"]["code"] == "invalid_api_key"


def test_a_stream_and_a_wait_end_without_a_word_when_their_key_is_revoked(keys: Keys) -> None:
    issued = keys.new()
    with keys.http(issued.token) as http:
        job_id = http.post("/v1/jobs", json=BODY).json()["id"]
        with http.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: state"
            keys.worker.ledger.keys.revoke(issued.key.id)
            time.sleep(2.5)
            keys.worker.run(job_id, "secret")
            assert "secret" not in "".join(lines)


def test_two_authorizations_are_none(server: ApiServer, keys: Keys) -> None:
    good = ("Authorization", f"Bearer {keys.new().token}")
    response = httpx.get(server.url + "/v1/jobs", headers=[good, good])
    assert response.status_code == 401


def test_clients_take_the_key_from_where_they_are_told(
    server: ApiServer, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, reader = keys.new().token, keys.new("shop", Scope.READ).token
    with Client(server.url, api_key=token) as client:
        job = client.submit("hi", model="bytes")
        assert job.tenant == "shop"
    monkeypatch.setenv("HEADRACE_API_KEY", f" {token}\n")
    with Client(server.url) as client:
        assert client.get(job).id == job.id
    with Client(server.url, api_key=reader) as client, pytest.raises(Forbidden):
        client.cancel(job)
    with Client(server.url, api_key=keys.new("rival").token) as client, pytest.raises(NotFound):
        next(client.events(job))
    with Client(server.url, api_key="") as client, pytest.raises(Unauthorized):
        client.get(job)

    async def read() -> str:
        async with AsyncClient(server.url, api_key=token) as client:
            return (await client.get(job)).tenant

    assert asyncio.run(read()) == "shop"


def test_a_key_with_a_line_break_is_refused_without_being_repeated() -> None:
    with pytest.raises(ValueError, match="API key") as caught:
        Client("http://127.0.0.1:1", api_key="hr_secret\nX-Evil: 1")
    assert "secret" not in str(caught.value)
