"""A client's connection to one server: its channel, its deadline, its retries."""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partialmethod
from threading import Event, Lock
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.errors import BadInput, ElastableError, StoreFailed
from elastable.embedding_store.measures import PROCESS, TRACE_KEY
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.retry import Retry
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.channels.status_codes import (
    NoAnswer,
    details_of,
    is_transient_code,
    raising,
    translated,
)
from elastable.embedding_store.wire.messages.frames import MAX_FRAME_BYTES

# gRPC channels that make their calls on other channels: with metadata added, or at another server once one is away


Call = Callable[..., Any]
"""A method of a server, as gRPC's channels return it: request, then options by name."""

_Callback = Callable[[grpc.ChannelConnectivity], None]
_Metadata = tuple[tuple[str, str | bytes], ...]


class CallChannel(Closing, grpc.Channel):
    """Calls one of several servers: the one that answered last.

    Calls under way, streams among them, stay where they began. Its calls are plain functions without gRPC's other ways
    to make a call (`future`, `with_call`). Safe to use from many threads at once.

    Args:
        channels: At least one; closed with this one.

    Attributes:
        at: The number of the channel that makes the next call.
    """

    def __init__(self, *channels: grpc.Channel) -> None:
        self._channels = channels
        self.at = 0
        self._lock = Lock()

    def go_to(self, channel: grpc.Channel) -> None:
        """The next calls are made on one more channel."""
        with self._lock:
            self._channels = (*self._channels, channel)
            self.at = len(self._channels) - 1

    def leave(self, number: int) -> None:
        """Goes on to the next channel, unless another thread has left that one already."""
        with self._lock:
            if self.at == number:
                self.at = (number + 1) % len(self._channels)

    def entries(self) -> _Metadata:
        """Metadata that the next call sends besides its own."""
        return ()

    def subscribe(self, callback: _Callback, try_to_connect: bool | None = False) -> None:
        for channel in self._channels:
            channel.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: _Callback) -> None:
        for channel in self._channels:
            channel.unsubscribe(callback)

    def close(self) -> None:
        """Closes all channels. Closing twice is harmless."""
        for channel in self._channels:
            channel.close()

    def _call(self, shape: str, /, *method: object, **settings: object) -> Call:
        calls: dict[int, Call] = {}

        def call(
            *arguments: object, metadata: Iterable[tuple[str, str | bytes]] | None = None, **options: object
        ) -> object:
            number = self.at
            made = calls.get(number)
            if made is None:
                made = calls.setdefault(number, getattr(self._channels[number], shape)(*method, **settings))
            return made(*arguments, metadata=(*self.entries(), *(metadata or ())), **options)

        return call

    unary_unary = partialmethod(_call, "unary_unary")  # type: ignore[assignment]
    unary_stream = partialmethod(_call, "unary_stream")  # type: ignore[assignment]
    stream_unary = partialmethod(_call, "stream_unary")  # type: ignore[assignment]
    stream_stream = partialmethod(_call, "stream_stream")  # type: ignore[assignment]


class MetadataChannel(CallChannel):
    """Sends `key: value` with every call on a channel: a token, or the secret of a session.

    Args:
        channel: Closed with this one.
        key, value: The entry.

    Attributes:
        value: Which may change.
    """

    def __init__(self, channel: grpc.Channel, key: str, value: str | bytes) -> None:
        super().__init__(channel)
        self._key, self.value = key, value

    def entries(self) -> _Metadata:
        return ((self._key, self.value),)


class TracedChannel(CallChannel):
    """Sends the current span with every call made inside one; `channels` are closed with this one."""

    def entries(self) -> _Metadata:
        parent = None if PROCESS.tracer is None else PROCESS.tracer.parent()
        return () if parent is None else ((TRACE_KEY, parent),)


_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Reply = TypeVar("Reply")

KEEPALIVE_MS = 10_000
"""A peer that is silent for so long is asked, and is dead after as long again."""

KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    # Without it gRPC waits a minute for the answer, whatever the timeout above says.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

MESSAGE_OPTIONS = [
    # Beside the frame itself, gRPC counts nothing; the margin is for the fields' lengths.
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
]

_CHANNEL_OPTIONS = [
    *MESSAGE_OPTIONS,
    *KEEPALIVE_OPTIONS,
    # gRPC's own waits between attempts to connect grow to two minutes: a worker
    # would miss a master that was restarted well within its deadline.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Nor may a name that leads to another machine by now keep its old address for half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Calls are repeated by `call` below. gRPC's own repeat of a stream that a dying server has refused may lose the
    # call: it never ends, whatever its timeout (seen with grpcio 1.85.1).
    ("grpc.enable_retries", 0),
    # Masters are peers in one network; a proxy of the environment is for the web.
    ("grpc.enable_http_proxy", 0),
]


def channel(address: str, credentials: Credentials | None = None) -> grpc.Channel:
    """A channel to `host:port` that notices a dead peer; it connects at the first call.

    Args:
        address: Of the server.
        credentials: What it is secured by, and the token that it sends; None: those of the environment.

    Raises:
        BadInput: no such address can be, or it cannot be called with such credentials.
    """
    where = Address.parse(address)
    if where.port == 0:
        raise BadInput(f"address {address!r}: port 0 is for listening; name the server's port")
    credentials = Credentials.from_environment() if credentials is None else credentials
    secured = credentials.for_client(where)
    if secured is None:
        opened = grpc.insecure_channel(str(where), options=_CHANNEL_OPTIONS)
    else:
        named = [] if credentials.server_name is None else [("grpc.ssl_target_name_override", credentials.server_name)]
        opened = grpc.secure_channel(str(where), secured, options=[*_CHANNEL_OPTIONS, *named])
    if PROCESS.tracer is not None:
        opened = TracedChannel(opened)
    # Without a token the channel is used directly.
    token = credentials.sent_token
    return opened if token is None else MetadataChannel(opened, "authorization", f"Bearer {token}")


def answered(answer: Answer | None) -> Answer:
    """The answer of a call of one message. Raises a `grpc.RpcError` of a server that is away where there is none."""
    if answer is None:
        raise NoAnswer("the call ended without an answer")
    return answer


class ServerConnection(Closing):
    """One channel, and the rule of every call on it: repeat until the deadline, then say so.

    A server may be at one of several addresses, one at a time: a call that does not reach it at one is repeated at the
    next.

    Safe to use from many threads at once.

    Attributes:
        address: As given; of a server that has moved (`follow`), where it was found last.
        channel: The channel; `close` closes it.

    Args:
        address: `host:port` of the server, or several of them with commas between.
        deadline_s: Seconds that a call may take, repeats included.
        credentials: Of this client; None: those of the environment.
        moves: Whether `follow` may be called.

    Raises:
        BadInput: no such address or deadline can be, an address is given twice, or it cannot be called with such
            credentials.
    """

    def __init__(
        self, address: str, deadline_s: float = 30.0, credentials: Credentials | None = None, moves: bool = False
    ) -> None:
        if not deadline_s > 0:
            raise BadInput(f"deadline of {deadline_s} s to {address}: it must be above 0")
        places = [place.strip() for place in address.split(",")]
        if len(set(places)) < len(places):
            raise BadInput(f"addresses {address!r}: one appears twice")
        self.address = address
        self.deadline_s = deadline_s
        credentials = Credentials.from_environment() if credentials is None else credentials
        self._credentials = credentials
        channels = [channel(place, credentials) for place in places]
        self._failover = CallChannel(*channels)
        # The channel of a single server is called directly.
        self.channel: grpc.Channel = self._failover if moves or len(places) > 1 else channels[0]
        self._find: Callable[[], str | None] | None = None
        self._looking = Lock()
        self._closed = Event()

    def follow(self, find: Callable[[], str | None]) -> None:
        """From now on the server is looked for elsewhere where it is not reached.

        Args:
            find: Gives its `host:port` as it is now, within a few seconds; None, or an `ElastableError`: nobody knows.
        """
        self._find = find

    def look_elsewhere(self) -> None:
        """The server was not reached: the next call is made where it is by now, if that is known to be elsewhere."""
        if self._find is None or not self._looking.acquire(blocking=False):
            return  # another thread is about to know
        try:
            place = self._find()
            if place is not None and place != self.address:
                self._failover.go_to(channel(place, self._credentials))
                _log.warning("the server at %s is at %s now", self.address, place)
                self.address = place
        except ElastableError as error:
            _log.debug("where the server at %s is now is not known: %s", self.address, error)
        finally:
            self._looking.release()

    def call(self, attempt: Callable[[float], Answer], wait_s: float = 0.0) -> Answer:
        """Runs `attempt(timeout_s)`, again with growing pauses while the server is not reached.

        Args:
            attempt: Makes one call of at most the seconds given, and may be made twice: the server may have done the
                work of an attempt whose answer was lost.
            wait_s: Seconds that the server is asked to wait, on top of the deadline. They are for a server that is
                there: one that is not reached is given up after the deadline alone.

        Raises:
            Unavailable, DeadlineExceeded: naming address and deadline.
            Unauthenticated: one end does not accept the other; at once where gRPC can tell.
            ElastableError: whatever the server answered.
        """
        began, at = time.monotonic(), self._failover.at
        try:
            return attempt(self.deadline_s + wait_s)
        except (grpc.RpcError, ValueError) as error:
            return self._again(attempt, wait_s, began, at, error)

    def _again(
        self, attempt: Callable[[float], Answer], wait_s: float, began: float, at: int, broke: Exception
    ) -> Answer:
        """Goes on with a call whose first attempt broke."""
        before, first = "", [broke]

        def once() -> Answer:
            nonlocal before, at
            try:
                if first:
                    raise first.pop()
                at = self._failover.at
                return attempt(max(retry.left + (wait_s if before else 0.0), 0.001))
            except grpc.RpcError as error:
                if not is_transient_code(error):
                    raise translated(error, self.address, self.deadline_s, before, wait_s) from error
                if not before:  # the server may have been there until now, waiting as it was asked to
                    retry.limit(self.deadline_s)
                before = details_of(error)
                if self._find is None:
                    self._failover.leave(at)
                else:
                    self.look_elsewhere()
                raise

        left_s = self.deadline_s + wait_s - (time.monotonic() - began)
        retry = Retry(left_s, lambda error: isinstance(error, grpc.RpcError), pause=self._closed.wait)
        with raising(self.address, self.deadline_s, wait_s):
            return retry.call(once)

    def send(self, method: Callable[..., Answer], request: Message, wait_s: float = 0.0) -> Answer:
        """Makes a call of one small message each way, as `call`."""
        return self.call(lambda timeout: answered(method(request, timeout=timeout)), wait_s)

    def decoded(self, decode: Callable[..., Answer], reply: object, *more: object) -> Answer:
        """What `decode(reply, *more)` makes of a reply.

        Raises:
            StoreFailed: the reply is malformed, for which the caller's input is not to blame.
        """
        try:
            return decode(reply, *more)
        except BadInput as error:
            raise StoreFailed(f"{self.address} sent a malformed answer: {error}") from error

    def close(self) -> None:
        """Closes the channel; calls under way fail. Closing twice is harmless."""
        self._closed.set()
        self.channel.close()
