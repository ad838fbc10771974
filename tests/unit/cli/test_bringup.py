"""What an instance settles before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cli.bringup import Plan, Screen, Stack
from cli.signals import Interrupt
from settings import settings_with


def test_a_broker_that_moves_says_what_producers_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("HEADRACE_REDIS_URL", "REDIS_URL", "CELERY_BROKER_URL"):
        monkeypatch.delenv(variable, raising=False)
    settings = settings_with(home=tmp_path, api={"port": 0}, worker={"metrics_port": 0}, flower_port=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        stack = Stack.plan(Plan(settings, broker_port=port), Screen(), Interrupt())
    told = capsys.readouterr().err
    assert f"a Celery producer has to use {stack.at.broker_url}" in told
    assert f"HEADRACE_REDIS_URL=redis://127.0.0.1:{port}/0" in told


def test_a_broker_on_any_free_port_needs_no_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("HEADRACE_REDIS_URL", "REDIS_URL", "CELERY_BROKER_URL"):
        monkeypatch.delenv(variable, raising=False)
    settings = settings_with(home=tmp_path, api={"port": 0}, worker={"metrics_port": 0}, flower_port=0)
    Stack.plan(Plan(settings, broker_port=0), Screen(), Interrupt())
    assert capsys.readouterr().err == ""
