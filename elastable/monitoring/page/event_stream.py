"""Server-sent events: the state of a process, once a second, to everybody who looks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

__all__ = ["MOST_STREAMS", "EventStream"]

MOST_STREAMS = 32
"""Streams at once; whoever asks for one more is told to come later."""

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
            told = f"{MOST_STREAMS} pages are open already\n"
            await PlainTextResponse(told, 503, {"Retry-After": "10"})(scope, receive, send)
            return
        self._streams += 1
        gone = asyncio.ensure_future(_gone(receive))
        try:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._events(gone, send)
        finally:
            self._streams -= 1
            gone.cancel()

    async def _events(self, gone: asyncio.Future[None], send: Send) -> None:
        last = False
        while not gone.done():
            body = f"retry: 2000\ndata: {await self._state()}\n\n".encode()
            with suppress(TimeoutError):
                sent = send({"type": "http.response.body", "body": body, "more_body": not last})
                await asyncio.wait_for(sent, _UNREAD_S)
                if not last:
                    last = await self._ends_meanwhile(gone)
                    continue
            return

    async def _ends_meanwhile(self, gone: asyncio.Future[None]) -> bool:
        """Waits for the next event; whether it is the last one."""
        for _ in range(round(_EVERY_S / _LOOK_S)):
            if self._ended:
                return True
            await asyncio.wait((gone,), timeout=_LOOK_S)
        return self._ended


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
