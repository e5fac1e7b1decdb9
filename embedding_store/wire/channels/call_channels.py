"""gRPC channels that make their calls on other channels: with metadata added, or at another server once one is away."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from types import TracebackType
from typing import Any, Self

import grpc

__all__ = ["Call", "CallChannel", "FailoverChannel", "MetadataChannel"]

Call = Callable[..., Any]
"""A method of a server, as gRPC's channels return it: request, then options by name."""

_Callback = Callable[[grpc.ChannelConnectivity], None]


class CallChannel(grpc.Channel):
    """What all four kinds of calls go through; a subclass says how one is made.

    Its calls are plain functions without gRPC's other ways to make a call (`future`, `with_call`).

    Args:
        channels: At least one; closed with this one.
    """

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self._channels = tuple(channels)

    @abstractmethod
    def made(self, on: Callable[[int], Call]) -> Call:
        """The call of a method, given that method on the n-th channel."""

    def unary_unary(self, *method: object, **settings: object) -> Call:  # type: ignore[override]
        return self._call("unary_unary", method, settings)

    def unary_stream(self, *method: object, **settings: object) -> Call:  # type: ignore[override]
        return self._call("unary_stream", method, settings)

    def stream_unary(self, *method: object, **settings: object) -> Call:  # type: ignore[override]
        return self._call("stream_unary", method, settings)

    def stream_stream(self, *method: object, **settings: object) -> Call:  # type: ignore[override]
        return self._call("stream_stream", method, settings)

    def subscribe(self, callback: _Callback, try_to_connect: bool | None = False) -> None:
        for channel in self._channels:
            channel.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: _Callback) -> None:
        for channel in self._channels:
            channel.unsubscribe(callback)

    def close(self) -> None:
        """Closes all channels. Closing twice is harmless."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, shape: str, method: tuple[object, ...], settings: dict[str, object]) -> Call:
        calls: dict[int, Call] = {}

        def on(number: int) -> Call:
            call = calls.get(number)
            if call is None:
                call = calls.setdefault(number, getattr(self._channels[number], shape)(*method, **settings))
            return call

        return self.made(on)


class FailoverChannel(CallChannel):
    """Calls one of several servers: the one that answered last.

    Calls under way, streams among them, stay where they began. Safe to use from many threads at once.

    Args:
        channels: At least one; closed with this one.
    """

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        super().__init__(channels)
        self._at = 0
        self._lock = Lock()

    @property
    def at(self) -> int:
        """The number of the channel that makes the next call."""
        return self._at

    @property
    def only(self) -> grpc.Channel:
        """The first channel, for a client of one server that stays where it is."""
        return self._channels[0]

    def go_to(self, channel: grpc.Channel) -> None:
        """The next calls are made on one more channel."""
        with self._lock:
            self._channels = (*self._channels, channel)
            self._at = len(self._channels) - 1

    def leave(self, number: int) -> None:
        """Goes on to the next channel, unless another thread has left that one already."""
        with self._lock:
            if self._at == number:
                self._at = (number + 1) % len(self._channels)

    def made(self, on: Callable[[int], Call]) -> Call:
        def call(*arguments: object, **options: object) -> object:
            return on(self._at)(*arguments, **options)

        return call


class MetadataChannel(CallChannel):
    """Sends `key: value` with every call on a channel: a token, or the secret of a session.

    Args:
        channel: Closed with this one.
        key, value: The entry.
    """

    def __init__(self, channel: grpc.Channel, key: str, value: str | bytes) -> None:
        super().__init__([channel])
        self._entry = (key, value)

    def made(self, on: Callable[[int], Call]) -> Call:
        made, entry = on(0), self._entry

        def call(
            *arguments: object, metadata: Iterable[tuple[str, str | bytes]] | None = None, **options: object
        ) -> object:
            return made(*arguments, metadata=(entry, *(metadata or ())), **options)

        return call
