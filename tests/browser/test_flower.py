"""Flower in a real browser, over a real worker: what people watch, and the button that they press."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace import Client, Job, JobStatus
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ledger import Ledger
from tests.integration.up_process import Up

pytestmark = pytest.mark.slow

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    instance = Up.start(
        tmp_path_factory.mktemp("flower") / "home", env={"HEADRACE_MODEL__MODEL_PATH": "fake:step_s=0.02"}
    )
    instance.wait_ready()
    yield instance
    instance.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.fail(f"this test needs {CHROMIUM}: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, up: Up) -> Iterator[Page]:
    context = browser.new_context(base_url=up.state()["flower_url"], viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.set_default_timeout(15_000)
    yield page
    context.close()


@pytest.fixture
def client(up: Up) -> Iterator[Client]:
    with Client(up.state()["api_url"]) as client:
        yield client


def submit(client: Client, **params: Any) -> Job:
    return client.submit("watch me", model="fake", **{"ignore_eos": True, "max_tokens": 5} | params)


def running(client: Client, job: Job) -> None:
    eventually(lambda: client.get(job).status is JobStatus.RUNNING)


def eventually(condition: Callable[[], object], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def engine(page: Page) -> dict[str, int]:
    """The engine's numbers as Flower's API gives them."""
    workers: dict[str, Any] = page.request.get("/api/workers?refresh=1").json()
    (worker,) = workers.values()
    numbers: dict[str, int] = worker["stats"]["pool"]["engine"]
    return numbers


def badge(page: Page, job: Job) -> str:
    """The state that a task's page shows."""
    page.goto(f"/task/{job.id}")
    return page.locator(".task-details-card .badge").first.inner_text()


def test_the_worker_is_listed_online(page: Page, client: Client) -> None:
    client.wait(submit(client), 30)
    page.goto("/workers")
    expect(page.locator("#workers-online")).to_have_text("1")
    row = page.locator("#workers-table tbody tr")
    expect(row).to_contain_text("fake@")
    expect(row).to_contain_text("Online")


def test_each_job_shows_its_state_its_runtime_and_its_result(page: Page, client: Client, tmp_path: Path) -> None:
    good = client.wait(submit(client, max_tokens=25), 30)
    bad = client.wait(client.submit("<<raise>>", model="fake", max_tokens=5), 30)
    assert (good.status, bad.status) == (JobStatus.SUCCEEDED, JobStatus.FAILED)
    assert good.result is not None
    eventually(lambda: badge(page, good) == "SUCCESS")
    card = page.locator(".task-details-card")
    expect(card).to_contain_text("25 tokens")
    expect(card).not_to_contain_text("watch me")
    expect(card).not_to_contain_text(good.result.text)
    runtime = float(page.request.get(f"/api/task/info/{good.id}").json()["runtime"])
    assert 0.4 < runtime < 10
    page.screenshot(path=tmp_path / "task.png")
    eventually(lambda: badge(page, bad) == "FAILURE")
    page.goto("/tasks")
    table = page.locator("#tasks-table tbody")
    for job, state in ((good, "SUCCESS"), (bad, "FAILURE")):
        expect(table.locator("tr", has_text=job.id)).to_contain_text(state)
    page.screenshot(path=tmp_path / "tasks.png")
    assert (tmp_path / "tasks.png").stat().st_size > 10_000


def test_the_terminate_button_stops_a_running_job(page: Page, client: Client, up: Up, tmp_path: Path) -> None:
    eventually(lambda: engine(page)["running"] == 0)
    free = engine(page)["pages_free"]
    job = submit(client, max_tokens=4000)
    running(client, job)
    eventually(lambda: badge(page, job) == "STARTED")
    assert engine(page)["pages_free"] < free
    page.screenshot(path=tmp_path / "running.png")
    page.get_by_role("button", name="Terminate").click()
    expect(page.locator("body")).to_contain_text(job.id)
    ended = client.wait(job, 15)
    assert ended.status is JobStatus.CANCELLED
    assert ended.result is not None
    assert 0 < ended.result.usage.completion_tokens < 4000
    eventually(lambda: engine(page)["pages_free"] == free and engine(page)["running"] == 0)
    eventually(lambda: badge(page, job) == "REVOKED")
    ledger = Ledger(up.state()["database_url"])
    row = ledger.get(job.id)
    ledger.check()
    ledger.close()
    assert row is not None
    assert row.status is JobStatus.CANCELLED


def test_a_queued_job_is_revoked_before_it_runs(page: Page, client: Client) -> None:
    seats = engine(page)["max_num_seqs"]
    blockers = [submit(client, max_tokens=4000) for _ in range(seats)]
    eventually(lambda: engine(page)["running"] == seats, 30)
    waiting = submit(client, max_tokens=5)
    client.cancel(waiting)
    assert client.wait(waiting, 15).status is JobStatus.CANCELLED
    for job in blockers:
        client.cancel(job)
    for job in blockers:
        assert client.wait(job, 30).status is JobStatus.CANCELLED
    eventually(lambda: engine(page)["running"] == 0)
