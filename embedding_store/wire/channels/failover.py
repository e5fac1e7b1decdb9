"""A channel to one of several servers: the one that was last seen to answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import grpc

from elastable.embedding_store.wire.channels.call_channel import CallChannel

__all__ = ["FailoverChannel"]


class FailoverChannel(CallChannel):
    """Makes calls on one channel of several; `leave` turns to the next one.

    Calls under way, streams among them, stay where they began. Safe to use
    from many threads at once.

    Args:
        channels: At least one; closed with this one.
    """

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        super().__init__(channels)
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

    def made(self, calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """A call on the channel of the moment."""

        def call(*arguments: Any, **options: Any) -> Any:
            return calls[self._at](*arguments, **options)

        return call
