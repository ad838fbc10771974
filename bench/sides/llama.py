"""llama.cpp's server, over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.sides.protocol import Arrival, Played, Prompt, die_with_parent, serve

START_TIMEOUT_S = 120.0
POLL_S = 0.01


class LlamaServer:
    """A server of its own; slots are erased between runs, since each would find its last prompt again."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._program = Path(options["program"])
        self._version = options["version"]
        self._slots = options["slots"]
        self._url = f"http://127.0.0.1:{_free_port()}"
        self._flags = {
            "-m": options["model"],
            "--port": self._url.rpartition(":")[2],
            "-np": str(self._slots),
            "-c": str(self._slots * options["slot_tokens"]),
            "-t": str(options["threads"]),
            "-tb": str(options["threads"]),
            "--cache-ram": "0",
            "--slot-save-path": options["saves"],
        }
        self._server: subprocess.Popen[bytes] | None = None

    def load(self) -> dict[str, Any]:
        flags = [part for pair in self._flags.items() for part in pair]
        self._server = subprocess.Popen(
            [str(self._program), *flags, "--no-webui", "--log-disable"],
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        until_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._server.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"llama-server did not start: {self._server.poll()}")
            time.sleep(POLL_S)
        shown = {name: value for name, value in self._flags.items() if name not in {"-m", "--port", "--slot-save-path"}}
        shown["model"] = Path(self._flags["-m"]).name
        return {"versions": {"llama.cpp": self._version}, "settings": shown}

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self._url}/health", timeout=1.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def reset(self) -> None:
        for slot in range(self._slots):
            httpx.post(f"{self._url}/slots/{slot}?action=erase", timeout=30.0).raise_for_status()

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        async def all_at_once() -> list[list[int]]:
            async with self._client() as client:
                return await asyncio.gather(*(self._complete(client, prompt, max_tokens) for prompt in prompts))

        return asyncio.run(all_at_once())

    async def _complete(self, client: httpx.AsyncClient, prompt: Prompt, max_tokens: int) -> list[int]:
        response = await client.post("/completion", json=_body(prompt, max_tokens) | {"return_tokens": True})
        response.raise_for_status()
        tokens: list[int] = response.json()["tokens"]
        return tokens

    def play(self, arrivals: list[Arrival]) -> list[Played]:
        async def all_in_time() -> list[Played]:
            async with self._client() as client:
                began_s = time.perf_counter()
                return await asyncio.gather(*(self._stream(client, arrival, began_s) for arrival in arrivals))

        return asyncio.run(all_in_time())

    async def _stream(self, client: httpx.AsyncClient, arrival: Arrival, began_s: float) -> Played:
        await asyncio.sleep(max(0.0, began_s + arrival["at_s"] - time.perf_counter()))
        moments: list[float] = []
        body = _body(arrival["prompt"], arrival["max_tokens"]) | {"stream": True, "return_tokens": True}
        async with client.stream("POST", "/completion", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    tokens = json.loads(line.removeprefix("data: ")).get("tokens", ())
                    moments += [time.perf_counter() - began_s] * len(tokens)
        return {"arrived_s": arrival["at_s"], "token_s": moments}

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits)

    def processes(self) -> list[int]:
        return [] if self._server is None else [self._server.pid]

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(30)


def _body(prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "n_predict": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "top_k": 1,
        "samplers": ["top_k"],
        "cache_prompt": True,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    serve(LlamaServer)
