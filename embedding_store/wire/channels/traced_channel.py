"""A gRPC channel whose calls say which span of a trace they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc

from elastable.embedding_store.measures.spans import PROCESS, TRACE_KEY
from elastable.embedding_store.wire.channels.call_channels import Call, CallChannel

__all__ = ["TracedChannel"]


class TracedChannel(CallChannel):
    """Sends the current span with every call; calls made outside of any span are sent as they are.

    Args:
        channel: Closed with this one.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__([channel])

    def made(self, on: Callable[[int], Call]) -> Call:
        made = on(0)

        def call(
            *arguments: object, metadata: Iterable[tuple[str, str | bytes]] | None = None, **options: object
        ) -> object:
            parent = None if PROCESS.tracer is None else PROCESS.tracer.parent()
            if parent is not None:
                metadata = ((TRACE_KEY, parent), *(metadata or ()))
            return made(*arguments, metadata=metadata, **options)

        return call
