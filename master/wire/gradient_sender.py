"""Handing gradients in: in the frames of a call, or laid down in memory where the master is on this host."""

from __future__ import annotations

import logging
import threading
import time

from elastable.embedding_store.errors import Unavailable, Unsupported
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.client.remote_source import RemoteSource
from elastable.embedding_store.wire.messages.upload import Upload
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel
from elastable.master.api import Push
from elastable.master.v1 import master_pb2
from elastable.master.wire.bulk_messages import push_frames

__all__ = ["GradientSender"]

_LOOK_AGAIN_S = 5.0
_log = logging.getLogger(__name__)


class GradientSender:
    """Makes the calls of `ReportGradient`. Safe to use from many threads.

    Args:
        connection: To the master.
        upload: The call.
        store: The rows that the same master serves: they say where its socket is.
    """

    def __init__(
        self, connection: ServerConnection, upload: Upload[master_pb2.ReportGradientReply], store: RemoteSource
    ) -> None:
        self._connection = connection
        self._upload = upload
        self._store = store
        self._sharing = False
        self._turn = threading.Lock()
        self._channel: SharedChannel | None = None
        self._look_again = 0.0

    def share_memory(self) -> None:
        """From now on arrays are laid down in memory where the master can map it: with it a socket's copies are saved.

        A master on another host, in another network namespace or whose store
        shares no memory gets frames, as before.
        """
        self._sharing = True

    def send(self, push: Push) -> master_pb2.ReportGradientReply:
        """Hands a micro-batch's gradients in; safe to repeat. Raises as `MasterClient.report_gradient`."""
        if self._sharing and self._turn.acquire(blocking=False):  # one message at a time; others go in frames
            try:
                channel = self._channel_now()
                if channel is not None:
                    return self._connection.call(lambda timeout: self._upload(push_frames(push, channel), timeout))
            except Unavailable:  # an OSError, too; frames would not get there either
                raise
            except (Unsupported, OSError) as error:
                _log.info("gradients go to the master at %s over gRPC: %s", self._connection.address, error)
                self.close()
            finally:
                self._turn.release()
        return self._connection.call(lambda timeout: self._upload(push_frames(push), timeout))

    def close(self) -> None:
        """Takes the memory back. Closing twice is harmless."""
        channel, self._channel = self._channel, None
        self._look_again = time.monotonic() + _LOOK_AGAIN_S  # the master may have begun anew
        if channel is not None:
            channel.close()

    def _channel_now(self) -> SharedChannel | None:
        """The channel, made now where it is time to try. Raises `Unsupported`, `OSError`."""
        if self._channel is None and time.monotonic() >= self._look_again:
            self._look_again = time.monotonic() + _LOOK_AGAIN_S
            self._channel = SharedChannel(*self._store.attach())
            _log.info("gradients are laid down in memory for the master at %s", self._connection.address)
        return self._channel
