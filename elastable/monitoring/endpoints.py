"""What a process answers over HTTP: metrics, health, the live page and its events."""

import asyncio
import base64
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import resources
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.measures import BOUNDS_S, Histogram
from elastable.monitoring.http_server import ALLOWED
from elastable.monitoring.metrics import SOURCE_FAILED, Metric, MetricKind, Sample, Source
from elastable.monitoring.page.views import Watched

T = TypeVar("T")


class Endpoints:
    """Answers for one process. One request at a time reads its state, in a separate thread.

    Args:
        others: What else the process answers at the same address.
    """

    def __init__(self, watched: Watched, others: Sequence[BaseRoute] = ()) -> None:
        self._watched = watched
        self._registry = registry_of(watched.sources)
        self._reader = ThreadPoolExecutor(1, "elastable-watched")
        self._prober = ThreadPoolExecutor(1, "elastable-probed")  # a probe waits for no metrics
        self._events = EventStream(self._state)
        routes: list[BaseRoute] = [
            *others,
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
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": _POLICY})

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


# Server-sent events: the state of a process, once a second, to everybody who looks


MOST_STREAMS = 32
"""Streams at once; one more request is answered with 503 and Retry-After."""

_EVERY_S = 1.0
_LOOK_S = 0.1  # from the end of the process to the last event
_UNREAD_S = 20.0  # that a client may take for an event


class EventStream:
    """An ASGI application that answers with events.

    Args:
        state: Makes the next event: one line.
    """

    def __init__(self, state: Callable[[], Awaitable[str]]) -> None:
        self._state = state
        self._streams = 0
        self._ended = False

    def end(self) -> None:
        """Every stream gets one more event, and ends."""
        self._ended = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams >= MOST_STREAMS:
            message = f"{MOST_STREAMS} pages are open already\n"
            await PlainTextResponse(message, 503, {"Retry-After": "10"})(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), _UNREAD_S)

        self._streams += 1
        try:
            with suppress(TimeoutError):
                await StreamingResponse(self._events(), media_type="text/event-stream")(scope, receive, send_in_time)
        finally:
            self._streams -= 1

    async def _events(self) -> AsyncIterator[str]:
        last = False
        while not last:
            last = self._ended
            yield f"retry: 2000\ndata: {await self._state()}\n\n"
            for _ in range(0 if last else round(_EVERY_S / _LOOK_S)):
                if not self._ended:
                    await asyncio.sleep(_LOOK_S)


# The live page: one file, and what a browser may do with it


PAGE = resources.files("elastable.monitoring.page").joinpath("live_page.html").read_text("utf-8")
"""Of a master, a parameter server or a store server. It loads nothing."""


def _hash(tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Its Content-Security-Policy: its own script and style, its own events, and nothing else.
_POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
    f"script-src {_hash('script')}; style-src {_hash('style')}; img-src data:"
)


# Sources of metrics as a collector of prometheus_client: everything is read when Prometheus asks


_log = logging.getLogger(__name__)


def registry_of(sources: Mapping[str, Source]) -> CollectorRegistry:
    """A registry of these sources by name and of the process itself; no other process or server shares it."""
    registry = CollectorRegistry()
    registry.register(_Sources(sources))
    ProcessCollector(registry=registry)
    return registry


class _Sources(Collector):
    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)

    def describe(self) -> list[Family]:
        """Nothing: registering must not read a store."""
        return []

    def collect(self) -> Iterator[Family]:
        by_metric: dict[Metric, list[Sample]] = {}
        for name, source in self._sources.items():
            failed = 0
            try:
                samples = list(source())
            except ElastableError as error:  # a store that is away hides no other metric
                _log.debug("metrics of the %s are left out: %s", name, error)
                samples, failed = [], 1
            for sample in (*samples, SOURCE_FAILED(failed, name)):
                by_metric.setdefault(sample.metric, []).append(sample)
        for metric, found in by_metric.items():
            yield _family(metric, found)


def _family(metric: Metric, samples: list[Sample]) -> Family:
    if metric.kind is MetricKind.HISTOGRAM:
        histograms = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for sample in samples:
            assert isinstance(sample.value, Histogram), metric.name
            counts = map(float, accumulate(sample.value.counts))
            buckets = list(zip([*map(repr, BOUNDS_S), "+Inf"], counts, strict=True))
            histograms.add_metric(sample.labels, buckets, sample.value.seconds)
        return histograms
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for sample in samples:
        assert not isinstance(sample.value, Histogram), metric.name
        family.add_metric(sample.labels, sample.value)
    return family
