"""The HTTP client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Self, TypeVar, Unpack

import httpx

from headrace import flows
from headrace.contract import DeadLetter, Job, JobStatus, ModelCard
from headrace.errors import Unavailable
from headrace.events import StateEvent, TokenEvent
from headrace.flows import Sleep, job_id_of
from headrace.params import JobParams, Messages, Prompt, new_request
from headrace.sse import EventReader, TextReader

T = TypeVar("T")


class AsyncClient:
    """`Client` for asyncio: the same methods, the same meanings. Cancelling a task ends its request, not the job."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        retries: int = 3,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout
        self._retries = retries
        self._http = httpx.AsyncClient(
            base_url=base_url, timeout=timeout, headers=flows.headers(api_key, headers), transport=transport
        )

    async def submit(
        self, prompt: Prompt | None = None, *, model: str, messages: Messages | None = None, **params: Unpack[JobParams]
    ) -> Job:
        """Enqueue a job for a `prompt` (text or token ids) or for chat `messages`."""
        return await self._perform(flows.submit(new_request(model, prompt, messages, params), self._retries))

    async def get(self, job: str | Job) -> Job:
        """The job as it stands now."""
        return await self._perform(flows.get(job_id_of(job), self._retries))

    async def wait(self, job: str | Job, timeout: float | None = None) -> Job:
        """The job when it has ended, however it ended; JobTimeout after `timeout` seconds.

        Restarts of the server are waited out. Without a timeout it waits for as long as it takes.
        """
        return await self._perform(flows.wait(job_id_of(job), timeout))

    async def run(
        self,
        prompt: Prompt | None = None,
        *,
        model: str,
        messages: Messages | None = None,
        timeout: float | None = None,
        **params: Unpack[JobParams],
    ) -> Job:
        """Submit and wait; raises JobFailed unless the job succeeded."""
        return await self._perform(flows.run(new_request(model, prompt, messages, params), timeout, self._retries))

    async def stream(self, job: str | Job, timeout: float | None = None) -> AsyncGenerator[str]:
        """The job's text, piece by piece as it is generated; raises JobFailed at an end without success.

        The pieces joined are the job's final text, over lost connections and restarted attempts.
        """
        text = TextReader(job_id_of(job))
        async with aclosing(self.events(job, timeout)) as events:
            async for event in events:
                if piece := text.take(event):
                    yield piece

    async def events(self, job: str | Job, timeout: float | None = None) -> AsyncGenerator[StateEvent | TokenEvent]:
        """Everything that happens to the job, from its beginning to its end."""
        reader = EventReader(job_id_of(job), timeout)
        while True:
            try:
                request = flows.build(self._http, reader.request(), self._timeout_s)
                async with aclosing(await self._http.send(request, stream=True)) as response:
                    if response.status_code != httpx.codes.OK:
                        await response.aread()
                        raise flows.error_of(response)
                    async for chunk in response.aiter_bytes():
                        for event in reader.feed(chunk):
                            yield event
                        if reader.done:
                            return
            except (httpx.RequestError, Unavailable):
                pass
            await asyncio.sleep(reader.pause_s())

    async def cancel(self, job: str | Job) -> Job:
        """Stop the job. A running one ends when its worker has let go of it: `wait` for that."""
        return await self._perform(flows.cancel(job_id_of(job), self._retries))

    async def retry(self, job: str | Job) -> Job:
        """Enqueue an ended job that did not succeed once more; raises Conflict in any other state."""
        return await self._perform(flows.retry(job_id_of(job)))

    async def jobs(
        self,
        *,
        status: JobStatus | str | None = None,
        model: str | None = None,
        tenant: str | None = None,
        page_size: int = 100,
    ) -> AsyncGenerator[Job]:
        """All jobs that match, newest first, fetched a page at a time."""
        after: str | None = None
        while True:
            page = await self._perform(flows.page(status, model, tenant, page_size, after, self._retries))
            for job in page.data:
                yield job
            if not page.has_more:
                return
            after = page.last_id

    async def dead_letters(
        self,
        *,
        model: str | None = None,
        tenant: str | None = None,
        older_than_s: float | None = None,
        page_size: int = 100,
    ) -> AsyncGenerator[Job]:
        """All jobs that used up their attempts, newest first; with `older_than_s` only those that ended before that."""
        after: str | None = None
        while True:
            flow = flows.dead_letters(model, tenant, older_than_s, page_size, after, self._retries)
            page = await self._perform(flow)
            for job in page.data:
                yield job
            if not page.has_more:
                return
            after = page.last_id

    async def dead_letter(self, job: str | Job) -> DeadLetter:
        """A dead letter with the attempts that it lost."""
        return await self._perform(flows.dead_letter(job_id_of(job), self._retries))

    async def replay(self, job: str | Job) -> Job:
        """Enqueue a dead letter again, its attempts counted from 0; raises NotFound for any other job."""
        return await self._perform(flows.replay(job_id_of(job)))

    async def purge(self, job: str | Job) -> Job:
        """Delete a dead letter for good. Returns it as it was."""
        return await self._perform(flows.purge(job_id_of(job)))

    async def models(self) -> list[ModelCard]:
        """The models that workers have announced."""
        return (await self._perform(flows.models(self._retries))).data

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _perform(self, flow: flows.Flow[T]) -> T:
        try:
            effect = next(flow)
            while True:
                if isinstance(effect, Sleep):
                    await asyncio.sleep(effect.seconds)
                    effect = next(flow)
                    continue
                request = flows.build(self._http, effect, self._timeout_s)
                try:
                    response = await self._http.send(request)
                except httpx.RequestError as error:
                    effect = flow.throw(flows.connection_failed(request, error))
                else:
                    effect = flow.send(response)
        except StopIteration as stop:
            result: T = stop.value
            return result
