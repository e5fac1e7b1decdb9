"""Arrays handed to a server: in the frames of a call, or laid down in memory where the server is on this host."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from elastable.embedding_store.errors import Unavailable, Unsupported
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.client.remote_source import RemoteSource
from elastable.embedding_store.wire.messages.frames import Upload
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel

__all__ = ["SharedUpload"]

Message = TypeVar("Message")
Reply = TypeVar("Reply")

_LOOK_AGAIN_S = 5.0
_log = logging.getLogger(__name__)


class SharedUpload(Generic[Message, Reply]):
    """Makes calls that hand gradients to a server. Safe to use from many threads.

    Args:
        connection: To the server.
        upload: The call.
        frames: (message, channel) -> its frames; with a channel arrays may lie there instead.
        rows: That the same server serves: they say where its socket is.
    """

    def __init__(
        self,
        connection: ServerConnection,
        upload: Upload[Reply],
        frames: Callable[[Message, SharedChannel | None], Iterator[bytes]],
        rows: RemoteSource,
    ) -> None:
        self._connection = connection
        self._upload = upload
        self._frames = frames
        self._rows = rows
        self._sharing = False
        self._turn = threading.Lock()
        self._channel: SharedChannel | None = None
        self._look_again = 0.0
        self._told: str | None = None  # why gradients go over gRPC, as it was logged

    def share_memory(self) -> None:
        """From now on arrays are laid down in memory where the server can map it: with it a socket's copies are saved.

        A server on another host, in another network namespace or whose store
        shares no memory gets frames, as before.
        """
        self._sharing = True

    def send(self, message: Message) -> Reply:
        """Makes the call, again until the deadline while the server is not reached; raises what the server answers."""
        if self._sharing and self._turn.acquire(blocking=False):  # one message at a time; others go in frames
            try:
                channel = self._channel_now()
                if channel is not None:
                    return self._connection.call(lambda timeout: self._upload(self._frames(message, channel), timeout))
            except Unavailable:  # an OSError, too; frames would not get there either
                raise
            except (Unsupported, OSError) as error:
                if str(error) != self._told:  # it is tried again every few seconds
                    self._told = str(error)
                    _log.info("gradients go to %s over gRPC: %s", self._connection.address, error)
                self.close()
            finally:
                self._turn.release()
        return self._connection.call(lambda timeout: self._upload(self._frames(message, None), timeout))

    def close(self) -> None:
        """Takes the memory back. Closing twice is harmless."""
        channel, self._channel = self._channel, None
        self._look_again = time.monotonic() + _LOOK_AGAIN_S  # the server may have begun anew
        if channel is not None:
            channel.close()

    def _channel_now(self) -> SharedChannel | None:
        """The channel, made now where it is time to try. Raises `Unsupported`, `OSError`."""
        if self._channel is None and time.monotonic() >= self._look_again:
            self._look_again = time.monotonic() + _LOOK_AGAIN_S
            self._channel = SharedChannel(*self._rows.attach())
            self._told = None
            _log.info("gradients are laid down in memory for %s", self._connection.address)
        return self._channel
