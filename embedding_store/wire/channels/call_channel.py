"""A channel whose calls are made on other channels, in a way of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

__all__ = ["CallChannel"]


class CallChannel(grpc.Channel):
    """What all four shapes of calls go through; a subclass says how one is made.

    Its calls are plain functions: they are made and waited for, and have none
    of gRPC's other ways to be made (`future`, `with_call`).

    Args:
        channels: At least one; closed with this one.
    """

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self._channels = tuple(channels)

    @abstractmethod
    def made(self, calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """The call of a method, of the same method's calls on each channel."""

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
        return self.made([getattr(channel, shape)(*method, **settings) for channel in self._channels])
