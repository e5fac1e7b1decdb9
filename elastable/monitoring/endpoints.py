"""The addresses that a process answers over HTTP: metrics, health, and the live page with its data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from elastable.monitoring.access import ALLOWED
from elastable.monitoring.collector import registry_of
from elastable.monitoring.page.event_stream import EventStream
from elastable.monitoring.page.live_page import PAGE
from elastable.monitoring.watched import Watched

__all__ = ["Endpoints"]

T = TypeVar("T")


class Endpoints:
    """Answers for one process. One request at a time reads its state, in a thread of its own.

    Args:
        watched: What it shows.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._registry = registry_of(watched.sources)
        self._reader = ThreadPoolExecutor(1, "elastable-watched")
        self._prober = ThreadPoolExecutor(1, "elastable-probed")  # a probe waits for no metrics
        self._events = EventStream(self._state)
        routes = [
            Route("/", self._index),
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
        ]
        if watched.view is not None:
            routes += [Route("/state", self._state_once), Route("/events", self._events)]
        self.app = Starlette(routes=routes)

    def end(self) -> None:
        """Those who look at the page get the last state."""
        self._events.end()

    def close(self) -> None:
        """Ends the threads. Closing twice is harmless."""
        for threads in (self._reader, self._prober):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _healthz(self, request: Request) -> Response:
        """The process lives, whatever has become of others."""
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        waiting = await _in(self._prober, self._watched.not_ready)
        if not waiting:
            return PlainTextResponse("ready\n")
        reasons = "".join(f"{name}: {why}\n" for name, why in waiting.items())
        return PlainTextResponse(f"not ready\n{reasons if request.scope[ALLOWED] else ''}", 503)

    async def _index(self, request: Request) -> Response:
        if self._watched.view is None:
            return PlainTextResponse("/metrics, /healthz and /readyz are served here; the page is the master's\n")
        return Response(PAGE.html, media_type="text/html", headers={"Content-Security-Policy": PAGE.policy})

    async def _state_once(self, request: Request) -> Response:
        return Response(await self._state(), media_type="application/json")

    async def _state(self) -> str:
        """What the page shows, in one line of JSON."""
        view = self._watched.view
        assert view is not None
        return await _in(self._reader, lambda: json.dumps(view(), allow_nan=False))

    async def _metrics(self, request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # it asks for a version of a format that is no version
            encode, content_type = choose_encoder("")
        return Response(await _in(self._reader, lambda: encode(self._registry)), media_type=content_type)


async def _in(threads: ThreadPoolExecutor, read: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, read)
