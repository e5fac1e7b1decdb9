"""Gradients handed to a master or to a store server: in frames, or in memory where the server is on this host."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import Unavailable, Unsupported
from elastable.embedding_store.support.array_body import BodyPlan
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.messages.frames import FrameReader, Upload, encode
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedChannels, SharedMessage

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_WORTH_SHARING = 128 << 10  # bytes; fewer are sent as quickly


def frames_of(header: Any, arrays: Sequence[Array], channel: SharedChannel | None) -> Iterator[bytes]:
    """The frames of a message; its arrays lie in a channel, if there is one and that is worth it.

    Args:
        header: Of the message; its field `shared` says where they lie.
        arrays: All of the message.
        channel: Memory that the server reads, too.
    """
    if channel is not None and sum(array.nbytes for array in arrays) >= _WORTH_SHARING:
        message = channel.put(arrays)
        header.shared.channel, header.shared.stamp = message.channel, message.stamp
        arrays = ()
    return encode(header.SerializeToString(), arrays)


def read_body(
    reader: FrameReader, header: Any, message: str, plan: BodyPlan, channels: SharedChannels | None
) -> Iterator[Array]:
    """The arrays of a message, from its frames or from the channel where its header says that they lie.

    Raises:
        BadInput: malformed frames.
        Unsupported: a channel that is not known here.
    """
    if not header.HasField("shared"):
        return iter(reader.read(plan))
    reader.read(BodyPlan(message))
    message_at = SharedMessage(header.shared.channel, header.shared.stamp)
    return iter((SharedChannels() if channels is None else channels).read(message_at, plan))


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
        attach: Asks the server for its memory: the name of a socket, and what to say there.
    """

    def __init__(
        self,
        connection: ServerConnection,
        upload: Upload[Reply],
        frames: Callable[[Message, SharedChannel | None], Iterator[bytes]],
        attach: Callable[[], tuple[str, bytes]],
    ) -> None:
        self._connection = connection
        self._upload = upload
        self._frames = frames
        self._attach = attach
        self._sharing = False
        self._sending = threading.Lock()
        self._channel: SharedChannel | None = None
        self._look_again = 0.0
        self._reason: str | None = None  # why gradients go over gRPC, as it was logged

    def share_memory(self) -> None:
        """From now on arrays are laid down in memory where the server can map it: with it a socket's copies are saved.

        A server on another host, in another network namespace or whose store shares no memory gets frames, as before.
        """
        self._sharing = True

    def send(self, message: Message) -> Reply:
        """Makes the call, again until the deadline while the server is not reached; raises what the server answers."""
        if self._sharing and self._sending.acquire(blocking=False):  # one message at a time; others go in frames
            try:
                channel = self._channel_now()
                if channel is not None:
                    return self._connection.call(lambda timeout: self._upload(self._frames(message, channel), timeout))
            except Unavailable:  # an OSError, too; frames would not get there either
                raise
            except (Unsupported, OSError) as error:
                if str(error) != self._reason:  # it is tried again every few seconds
                    self._reason = str(error)
                    _log.info("gradients go to %s over gRPC: %s", self._connection.address, error)
                self.close()
            finally:
                self._sending.release()
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
            self._channel = SharedChannel(*self._attach())
            self._reason = None
            _log.info("gradients are laid down in memory for %s", self._connection.address)
        return self._channel
