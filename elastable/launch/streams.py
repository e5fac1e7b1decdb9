"""What replicas write, shown line by line with the rank that wrote it."""

from __future__ import annotations

import socket
from typing import BinaryIO

__all__ = ["RankStream"]

_LONGEST_LINE = 1 << 16


class RankStream:
    """One stream of one member.

    Args:
        rank: Of the member.
        connection: Where its bytes come from.
        into: Where its lines go.
    """

    def __init__(self, rank: int, connection: socket.socket, into: BinaryIO) -> None:
        self.connection = connection
        self._prefix = f"[{rank}] ".encode()
        self._into = into
        self._begun = b""

    def take(self) -> bool:
        """Shows what has come; whether more can come."""
        try:
            piece = self.connection.recv(1 << 16)
        except TimeoutError:
            return True
        except OSError:
            piece = b""
        *lines, self._begun = (self._begun + piece).split(b"\n")
        if self._begun and (not piece or len(self._begun) > _LONGEST_LINE):
            lines.append(self._begun)
            self._begun = b""
        for line in lines:
            self._into.write(self._prefix + line + b"\n")
        self._into.flush()
        return bool(piece)
