"""Requests and tokens a minute: counted on the broker for all API processes, by each alone while it is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ledger import Ledger
from ledger.credentials import NewKey, Scope
from tests.conftest import Broker
from tests.integration.api.conftest import ApiServer, HandWorker, api_settings

BODY = {"model": "bytes", "prompt": "hi", "max_tokens": 8}


@pytest.fixture
def ring(migrated_url: str) -> Iterator[Ledger]:
    ledger = Ledger(migrated_url)
    yield ledger
    ledger.close()


def bearer(ledger: Ledger, tenant: str = "shop", **more: object) -> dict[str, str]:
    issued = ledger.keys.create(NewKey(tenant, **more))  # type: ignore[arg-type]
    return {"Authorization": f"Bearer {issued.token}"}


def test_a_tenants_keys_share_the_settings_limit_across_processes(
    ring: Ledger, broker_url: str, migrated_url: str, tmp_path: Path
) -> None:
    settings = api_settings(migrated_url, broker_url, tmp_path, auth="keys", requests_per_minute=4)
    first, second, rival = bearer(ring), bearer(ring), bearer(ring, "rival")
    with ApiServer(settings).running() as one, ApiServer(settings).running() as two:
        answers = [
            httpx.get(f"{server.url}/v1/jobs", headers=key)
            for server, key in ((one, first), (two, second), (one, second), (two, first))
        ]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers] == [3, 2, 1, 0]
        refused = httpx.get(f"{two.url}/v1/jobs", headers=second)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-limit-requests"] == "4"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert httpx.get(f"{two.url}/v1/jobs", headers=rival).status_code == 200
        assert httpx.get(f"{one.url}/healthz").status_code == 200


def test_a_key_with_its_own_limit_is_counted_by_itself(
    ring: Ledger, broker_url: str, migrated_url: str, tmp_path: Path
) -> None:
    settings = api_settings(migrated_url, broker_url, tmp_path, auth="keys", requests_per_minute=1)
    own, common = bearer(ring, requests_per_minute=3), bearer(ring, scopes=frozenset({Scope.READ}))
    with ApiServer(settings).running() as server:

        def statuses(key: dict[str, str], count: int) -> list[int]:
            return [httpx.get(f"{server.url}/v1/jobs", headers=key).status_code for _ in range(count)]

        assert statuses(own, 4) == [200, 200, 200, 429]
        assert statuses(common, 2) == [200, 429]


def test_tokens_count_the_prompt_and_what_may_come(
    ring: Ledger, broker_url: str, migrated_url: str, tmp_path: Path
) -> None:
    worker = HandWorker(ring, broker_url)
    worker.register()
    settings = api_settings(migrated_url, broker_url, tmp_path, auth="keys", tokens_per_minute=25)
    key = bearer(ring)
    with ApiServer(settings).running() as server, httpx.Client(base_url=server.url, headers=key) as http:
        answers = [http.post("/v1/jobs", json=BODY) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]  # 10 tokens each
        assert answers[0].headers["x-ratelimit-remaining-tokens"] == "15"
        assert "25 tokens a minute" in answers[2].json()["error"]["message"]
        assert http.post("/v1/jobs", json={**BODY, "max_tokens": 3}).status_code == 202
        never = http.post("/v1/jobs", json={**BODY, "max_tokens": 24})
        assert never.status_code == 400
        assert never.json()["error"]["code"] == "over_token_limit"
        assert len(http.get("/v1/jobs").json()["data"]) == 3
    worker.broker.close()


def test_without_keys_everybody_shares_one_limit(broker_url: str, migrated_url: str, tmp_path: Path) -> None:
    settings = api_settings(migrated_url, broker_url, tmp_path, requests_per_minute=2)
    with ApiServer(settings).running() as server:
        assert [httpx.get(f"{server.url}/v1/jobs").status_code for _ in range(3)] == [200, 200, 429]


def test_while_the_broker_is_away_each_process_counts_by_itself(
    broker: Broker, migrated_url: str, tmp_path: Path
) -> None:
    settings = api_settings(migrated_url, broker.url, tmp_path, requests_per_minute=3)
    with ApiServer(settings).running() as server:
        assert httpx.get(f"{server.url}/v1/jobs").status_code == 200
        broker.kill()
        statuses = [httpx.get(f"{server.url}/v1/jobs", timeout=20).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]


def test_without_limits_nothing_is_counted(broker_url: str, migrated_url: str, tmp_path: Path) -> None:
    with ApiServer(api_settings(migrated_url, broker_url, tmp_path)).running() as server:
        answer = httpx.get(f"{server.url}/v1/jobs")
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
