"""A channel to one of several servers: the one that was last seen to answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from types import TracebackType
from typing import Any, Self

import grpc

__all__ = ["FailoverChannel"]


class FailoverChannel(grpc.Channel):  # type: ignore[misc]
    """Makes calls on one channel of several; `leave` turns to the next one.

    Calls under way, streams among them, stay where they began. Safe to use
    from many threads at once.

    Args:
        channels: At least one; closed with this one.
    """

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self._channels = tuple(channels)
        self._at = 0
        self._lock = Lock()

    @property
    def at(self) -> int:
        """The number of the channel on which the next call is made."""
        return self._at

    @property
    def only(self) -> grpc.Channel:
        """The first channel itself, for whoever has no other."""
        return self._channels[0]

    def leave(self, number: int) -> None:
        """Turns to the next channel, unless another thread has turned away from that one already."""
        with self._lock:
            if self._at == number:
                self._at = (number + 1) % len(self._channels)

    def unary_unary(self, *method: Any, **settings: Any) -> Any:
        """As in `grpc.Channel`."""
        return self._call("unary_unary", method, settings)

    def unary_stream(self, *method: Any, **settings: Any) -> Any:
        """As in `grpc.Channel`."""
        return self._call("unary_stream", method, settings)

    def stream_unary(self, *method: Any, **settings: Any) -> Any:
        """As in `grpc.Channel`."""
        return self._call("stream_unary", method, settings)

    def stream_stream(self, *method: Any, **settings: Any) -> Any:
        """As in `grpc.Channel`."""
        return self._call("stream_stream", method, settings)

    def subscribe(self, callback: Callable[..., Any], try_to_connect: bool = False) -> None:
        """As in `grpc.Channel`, to all channels."""
        for channel in self._channels:
            channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[..., Any]) -> None:
        """As in `grpc.Channel`, from all channels."""
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

    def _call(self, shape: str, method: tuple[Any, ...], settings: dict[str, Any]) -> Callable[..., Any]:
        calls = [getattr(channel, shape)(*method, **settings) for channel in self._channels]

        def call(*arguments: Any, **options: Any) -> Any:
            return calls[self._at](*arguments, **options)

        return call
