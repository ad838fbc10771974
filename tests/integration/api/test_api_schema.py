"""The door against its own description: whatever fits it, or nearly does, gets an answer that fits it too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis import settings as examples
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from api.app import create_app
from ledger import Ledger
from ledger.credentials import NewKey, Scope
from settings import Settings
from tests.integration.api.conftest import ApiServer, HandWorker

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
DESCRIPTION = json.loads(json.dumps(create_app(Settings()).openapi()))
schema = schemathesis.openapi.from_dict(DESCRIPTION)


@pytest.fixture(scope="module")
def door(module_settings: Settings) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a server that asks for keys, and the headers of somebody who may do everything."""
    hand = HandWorker(Ledger(module_settings.ledger_url), module_settings.broker_url)
    hand.register()
    hand.announce()
    issued = hand.ledger.keys.create(NewKey("fuzz", scopes=frozenset({Scope.ADMIN})))
    api = module_settings.api.model_copy(update={"auth": "keys", "max_wait_s": 0.05})
    with ApiServer(module_settings.model_copy(update={"api": api})).running() as server:
        yield server.url, {"Authorization": f"Bearer {issued.token}"}
    hand.close()


@schema.exclude(path_regex="/events$").parametrize()
@examples(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_every_answer_is_as_described(case: Any, door: tuple[str, dict[str, str]]) -> None:
    url, headers = door
    response = case.call(base_url=url, headers=headers)
    may_be_unready = case.path == "/readyz"  # 503 is its answer when nobody has been heard of for a while
    case.validate_response(response, checks=CHECKS[may_be_unready:])
