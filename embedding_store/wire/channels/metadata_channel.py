"""A channel that sends an entry of metadata with every call: a token, or the secret of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from elastable.embedding_store.wire.channels.call_channel import CallChannel

__all__ = ["MetadataChannel"]


class MetadataChannel(CallChannel):
    """Sends `key: value` with every call on a channel, which is closed with this one."""

    def __init__(self, channel: grpc.Channel, key: str, value: str | bytes) -> None:
        super().__init__([channel])
        self._entry = (key, value)

    def made(self, calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """A call with the entry among its metadata."""
        (made,), entry = calls, self._entry

        def call(*arguments: Any, metadata: Iterable[tuple[str, str | bytes]] | None = None, **options: Any) -> Any:
            return made(*arguments, metadata=(entry, *(metadata or ())), **options)

        return call
