"""Calls that send frames: as a unary call where there is one frame, as a stream where there are more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

import grpc

__all__ = ["StreamingUpload", "Upload"]

Reply = TypeVar("Reply")


class Upload(Generic[Reply]):
    """A call that sends frames and takes one reply.

    gRPC starts a thread for each call that sends a stream; on the wire a unary call is the same.

    Args:
        channel: To the server.
        path: `/package.Service/Method`.
        parse: Makes the reply of its bytes.
    """

    def __init__(self, channel: grpc.Channel, path: str, parse: Callable[[bytes], Reply]) -> None:
        self._one = channel.unary_unary(path, None, parse)
        self._many = channel.stream_unary(path, None, parse)

    def __call__(self, frames: Iterator[bytes], timeout: float) -> Reply:
        """Makes the call; raises `grpc.RpcError`."""
        first, second = next(frames), next(frames, None)
        if second is None:
            reply: Reply = self._one(first, timeout=timeout)
        else:
            reply = self._many(chain((first, second), frames), timeout=timeout)
        return reply


class StreamingUpload:
    """A call that sends frames and takes frames; `channel` and `path` as in `Upload`."""

    def __init__(self, channel: grpc.Channel, path: str) -> None:
        self._one = channel.unary_stream(path, None, None)
        self._many = channel.stream_stream(path, None, None)

    def __call__(self, frames: Iterator[bytes], timeout: float) -> Iterable[bytes]:
        """Makes the call; its reply's frames, which raise `grpc.RpcError`."""
        first, second = next(frames), next(frames, None)
        if second is None:
            return self._one(first, timeout=timeout)
        return self._many(chain((first, second), frames), timeout=timeout)
