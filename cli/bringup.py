"""Bring an instance up in order: model, broker, database, API, worker, Flower; and down again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from headrace.urls import masked
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cli import models, services
from cli.instance import Instance, broker_given, ledger_url
from cli.output import Failure, err
from cli.ports import choose
from cli.signals import Interrupt
from cli.supervisor import Line, State, Supervisor
from settings import Settings

COLOURS = {"broker": "magenta", "api": "cyan", "worker": "green", "flower": "yellow"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What the user asked for."""

    settings: Settings
    broker_port: int = 6379
    flower: bool = True


@dataclass
class Screen:
    """What an instance shows of itself, on standard error."""

    quiet: bool = False
    """Keep the services' own output in their logs."""
    starting: bool = False

    def report(self, message: str) -> None:
        err.print(f"[bold]headrace[/] [dim]|[/] {escape(message)}", soft_wrap=True)

    def line(self, line: Line) -> None:
        if not self.quiet and not self.starting:
            colour = COLOURS.get(line.service, "white")
            err.print(f"[{colour}]{line.service:>8}[/] [dim]|[/] {escape(line.text)}", soft_wrap=True)

    @contextmanager
    def progress(self, supervisor: Supervisor) -> Iterator[None]:
        """A live table of the services while they start; their lines wait in the logs meanwhile."""
        self.starting = True
        try:
            with Live(get_renderable=lambda: _table(supervisor), console=err, refresh_per_second=4, transient=True):
                yield
        finally:
            self.starting = False


def _table(supervisor: Supervisor) -> Table:
    rows = Table.grid(padding=(0, 2))
    for child in list(supervisor.children.values()):
        mark = "[green]✓[/]" if child.state is State.READY else "[yellow]…[/]"
        rows.add_row(mark, child.service.name, f"[dim]{child.state.value}[/]")
    return rows


@dataclass(frozen=True, slots=True)
class Stack:
    """An instance: its plan, its addresses and its processes."""

    settings: Settings
    at: services.Addresses
    flower: bool
    supervisor: Supervisor
    screen: Screen

    @classmethod
    def plan(cls, plan: Plan, screen: Screen, interrupt: Interrupt) -> Self:
        """Settle the addresses, without starting anything."""
        settings = plan.settings
        embedded = not broker_given(settings)
        broker_port = choose("the broker", plan.broker_port, screen.report) if embedded else None
        if broker_port not in (None, plan.broker_port) and plan.broker_port:
            screen.report(
                f"a Celery producer has to use redis://127.0.0.1:{broker_port}/0; if a Redis for Headrace listens on "
                f"{plan.broker_port}, HEADRACE_REDIS_URL=redis://127.0.0.1:{plan.broker_port}/0 makes `up` use it"
            )
        at = services.Addresses(
            broker_url=f"redis://127.0.0.1:{broker_port}/0" if embedded else settings.broker_url,
            database_url=ledger_url(settings),
            api_port=choose("the API", settings.api.port, screen.report),
            flower_port=choose("Flower", settings.flower_port, screen.report) if plan.flower else 0,
            metrics_port=choose("the worker's metrics", settings.worker.metrics_port, screen.report),
            broker_port=broker_port,
        )
        supervisor = Supervisor(settings.home / "logs", screen.line, screen.report, interrupt.event)
        interrupt.hurry = supervisor.hurry
        return cls(settings, at, plan.flower, supervisor, screen)

    def start(self) -> None:
        """Start everything and return when it serves. Raises Failure, or KeyboardInterrupt if told to stop."""
        models.pull_model(self.settings)
        env = services.child_environment(self.settings, self.at)
        run = self.supervisor
        with self.screen.progress(run):
            self._start_broker()
            self._start_ledger()
            started = [run.start(services.api(self.at, env)), run.start(services.worker(self.settings, self.at, env))]
            if self.flower:
                started.append(run.start(services.flower(self.at, env)))
            run.wait_ready(started)
        self._record()

    def _start_broker(self) -> None:
        if self.at.broker_port is not None:
            service = services.broker(self.settings.home / "broker", self.at.broker_port)
            self.supervisor.wait_ready([self.supervisor.start(service)])
        elif not services.broker_answers(self.at.broker_url):
            raise Failure(
                f"no broker answers at {masked(self.at.broker_url)}",
                "start it, or unset HEADRACE_REDIS_URL, REDIS_URL and CELERY_BROKER_URL to embed one",
            )

    def _start_ledger(self) -> None:
        from ledger import migrate

        migrate.upgrade(self.at.database_url)
        models.register_model(self.settings, self.at.database_url)

    def keep(self) -> None:
        """Keep everything running until interrupted. Raises Failure when something can't be kept running."""
        self.supervisor.watch(self._record)

    def stop(self, *, patient: bool = True) -> None:
        """Stop everything; `patient`: running jobs may take their time, and it is said how much that is."""
        if patient and "worker" in self.supervisor.pids():
            self.screen.report(
                f"running jobs have up to {self.settings.worker.drain_s:g} s to finish; a second Ctrl-C doesn't wait"
            )
        self.supervisor.stop(services.STOP_ORDER)

    def urls(self) -> dict[str, str]:
        """What a person wants to open."""
        urls = {"API": self.at.api_url, "API docs": f"{self.at.api_url}/docs"}
        if self.flower:
            urls["Flower"] = self.at.flower_url
        return urls | {"broker": masked(self.at.broker_url), "ledger": masked(self.at.database_url)}

    def _record(self) -> None:
        Instance(
            api_url=self.at.api_url,
            flower_url=self.at.flower_url if self.flower else None,
            broker_url=self.at.broker_url,
            database_url=self.at.database_url,
            model=self.settings.model.name,
            pid=os.getpid(),
            pids=self.supervisor.pids(),
        ).write(self.settings.home)
