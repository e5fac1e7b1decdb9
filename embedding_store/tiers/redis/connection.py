"""Connections to Redis servers, made by redis-py; every wait on them ends at a `Deadline`. For bulk, several at once.

The only module that touches the socket of a redis-py connection: redis-py makes an object of every value, and its
timeouts bound each step of a call, not the call.
"""

import math
import select
import ssl
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from socket import socket
from typing import Any, cast

import hiredis
import numpy as np
import numpy.typing as npt
import redis

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, ElastableError, StoreFailed, Unavailable
from elastable.embedding_store.log.contract import Buffer
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.clocks import compile_seconds
from elastable.embedding_store.tiers.redis.reply_shapes import (
    Command,
    Reply,
    packed_command,
    reply_error,
    require_shapes,
)
from elastable.embedding_store.tiers.redis.url import RedisUrl

_INBOX_BYTES = 1 << 20  # stays in the second-level cache while it is decoded

_MOST_PIECES = 512  # the system takes 1,024 buffers at a time
MORE_TO_COME = object()  # has to come before a reply is whole
_PINGS = 3  # one may meet a server, or a machine, that is busy


class ConnectionLost(Unavailable):
    """The server closed or broke a connection that stood."""


class Deadline:
    """A moment after which nothing waits any more.

    Time in which this process compiles kernels is not counted: no server has to answer for it, and the first
    commit on a fresh machine compiles for longer than a store may be away.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._compiled = compile_seconds()

    def left(self, waiting_for: object) -> float:
        """Seconds left, above 0.

        Raises:
            DeadlineExceeded: none is; names `waiting_for` and the deadline.
        """
        left = self._end + (compile_seconds() - self._compiled) - time.monotonic()
        if left <= 0:
            raise self.exceeded(waiting_for)
        return left

    def exceeded(self, waiting_for: object) -> DeadlineExceeded:
        """The error of a wait for `waiting_for` that reached this deadline."""
        return DeadlineExceeded(f"no answer from redis at {waiting_for} within the deadline of {self.seconds:g} s")


class Connection:
    """A connection that is logged in, to one server. For one thread at a time.

    Attributes:
        address: Of the server.
        socket: redis-py's, non-blocking.
        inbox: uint8, where bulk replies are received.
        round_trip_s: Seconds that the fastest of some PINGs took when the connection was made.
        name: That the server knows it by, no other one's; "": it has none.
        verified: Of each table the partitions whose stamps were read on this connection, by what a writer counts in.
    """

    def __init__(self, url: RedisUrl, address: Address, deadline: Deadline) -> None:
        """Connects and logs in.

        Raises:
            Unavailable, DeadlineExceeded: naming address and deadline.
            StoreFailed: the server refused the login or the database.
            NotReady: it is loading its data.
            BadInput: the certificates of the URL cannot be read.
        """
        self.address = address
        self.inbox: UInt8 = np.empty(_INBOX_BYTES, np.uint8)
        self.name = ""
        self.verified: dict[object, npt.NDArray[np.bool_]] = {}
        self._made = _connected(url, address, deadline)
        self.socket = cast(socket, self._made._sock)
        self.socket.setblocking(False)
        try:
            self.round_trip_s = min(self._ping(deadline) for _ in range(_PINGS))
        except BaseException:
            self.close()
            raise

    def _ping(self, deadline: Deadline) -> float:
        began = time.monotonic()
        self.call([("PING",)], deadline)
        return time.monotonic() - began

    def call(self, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        """Sends the commands in one go; the replies in order, errors as `hiredis.ReplyError` objects."""
        request = [b"".join(packed_command(command) for command in commands)]
        replies = self.converse(iter([request]), len(commands), deadline)
        require_shapes(commands, replies, self.address)
        return replies

    def converse(
        self, requests: Iterator[Sequence[Buffer]], wanted: int, deadline: Deadline, most_bytes: float = math.inf
    ) -> list[object]:
        """Sends requests without a copy of their pieces, and receives replies; errors of the server are among them.

        Args:
            requests: Bytes to send, made while those before them are on their way.
            wanted: Commands among them.
            deadline: Of everything together.
            most_bytes: Of all replies.

        Raises:
            Unavailable, DeadlineExceeded: naming address and deadline.
            StoreFailed: what answers speaks no Redis, or sends more.
        """
        reader = hiredis.Reader(notEnoughData=MORE_TO_COME)
        replies: list[object] = []
        unsent: list[memoryview] = []
        received = 0
        while len(replies) < wanted:
            if not unsent:
                unsent = _views(next(requests, ()))
            if unsent and (sent := self.send(unsent)):
                unsent = without_sent(unsent, sent)
                continue
            got = self.receive(0)
            if not got:
                self.wait(bool(unsent), deadline)
                continue
            received += got
            reader.feed(self.inbox[:got].tobytes())
            replies += whole_replies(reader, self.address)
            if received > most_bytes or len(replies) > wanted:
                raise StoreFailed(f"redis at {self.address} sent more than it was asked for")
        return replies

    def wait(self, to_send: bool, deadline: Deadline) -> None:
        """Returns when something can be received, or sent if there is something `to_send`."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN | (select.POLLOUT if to_send else 0))
        if not poller.poll(1000 * deadline.left(self.address)):
            raise deadline.exceeded(self.address)

    def send(self, pieces: Sequence[memoryview]) -> int:
        """Bytes of the pieces, one after the other, that went out at once; 0 if none can go now."""
        try:
            if isinstance(self.socket, ssl.SSLSocket):  # which has no sendmsg
                return self.socket.send(pieces[0])
            return self.socket.sendmsg(pieces[:_MOST_PIECES])
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            raise self.lost(error) from error

    def receive(self, start: int) -> int:
        """Bytes received to `inbox[start:]`, 0 if none are there now."""
        try:
            received = self.socket.recv_into(self.inbox.data[start:])
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            raise self.lost(error) from error
        if not received:
            raise self.lost("the server closed it")
        return received

    def quiet(self) -> bool:
        """Whether nothing can be received: on an idle connection that would be its end."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return not poller.poll(0)

    def holds_decrypted(self) -> bool:
        """Whether bytes have come that `wait` does not see: TLS decrypts whole records."""
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0

    def lost(self, why: object) -> ConnectionLost:
        """The error of a connection that broke."""
        return ConnectionLost(f"the connection to redis at {self.address} broke: {why}")

    def close(self) -> None:
        """Closes the socket. Closing twice is harmless."""
        self._made.disconnect()  # type: ignore[no-untyped-call]


def _views(pieces: Sequence[Buffer]) -> list[memoryview]:
    return [memoryview(piece).cast("B") for piece in pieces if len(piece)]


def without_sent(pieces: Sequence[memoryview], sent: int) -> list[memoryview]:
    """The pieces after the first bytes; empty ones are left out."""
    for number, piece in enumerate(pieces):
        if sent < len(piece):
            return [piece[sent:], *pieces[number + 1 :]]
        sent -= len(piece)
    return []


def whole_replies(reader: hiredis.Reader, who: object) -> Iterator[object]:
    """The replies that have come as a whole. Raises `StoreFailed` where the bytes are none, naming `who` sent them."""
    try:
        while (reply := reader.gets()) is not MORE_TO_COME:
            yield reply
    except hiredis.ProtocolError as error:
        raise StoreFailed(f"what listens at {who} speaks no Redis: {error}") from error


def _connected(url: RedisUrl, address: Address, deadline: Deadline) -> redis.Connection:
    """A connection of redis-py that is logged in, made by a thread: it bounds its steps, and looking a name up not."""
    seconds = deadline.left(address)
    options: dict[str, Any] = {"host": address.host, "port": address.port, "db": url.db, "protocol": 2}
    options |= {"username": url.username or None, "password": url.password or None, "driver_info": None}
    options |= {"socket_timeout": seconds, "socket_connect_timeout": seconds, "socket_keepalive": True}
    if url.tls:
        options["redis_connect_func"] = partial(_encrypt, _trusting(url), address.host)
    made = redis.Connection(**options)  # type: ignore[no-untyped-call]
    connecting = ThreadPoolExecutor(1, "connect")
    try:
        try:
            connected = connecting.submit(made.connect)
        except RuntimeError:  # the interpreter is ending, and starts no thread any more: a store is closed
            made.connect()  # type: ignore[no-untyped-call]
        else:
            connected.result(deadline.left(address))
    except (TimeoutError, redis.TimeoutError) as error:
        made.disconnect()  # type: ignore[no-untyped-call]  # the thread waits no longer
        raise deadline.exceeded(address) from error
    except redis.exceptions.InvalidResponse as error:
        raise StoreFailed(f"what listens at {address} speaks no Redis: {error}") from error
    except (OSError, redis.RedisError) as error:
        raise _not_connected(url, address, deadline, error) from error
    finally:
        connecting.shutdown(wait=False)
    return made


def _encrypt(context: ssl.SSLContext, host: str, made: Any) -> None:
    """redis-py's own TLS trusts the system's authorities besides those of `ca=`."""
    made._sock = context.wrap_socket(made._sock, server_hostname=host)
    made.on_connect()


def _trusting(url: RedisUrl) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=url.ca or None)
    except OSError as error:
        raise BadInput(f"ca={url.ca} of {url} cannot be read: {error}") from error


def _not_connected(url: RedisUrl, address: Address, deadline: Deadline, error: Exception) -> ElastableError:
    """Where a server answered, which redis-py tells by a status, it has refused the login."""
    status = getattr(error, "status_code", None)
    if status or isinstance(error, redis.ResponseError | redis.AuthenticationError):
        return reply_error(f"redis at {address} refused the login", f"{status} {error}" if status else str(error), url)
    return Unavailable(f"redis at {address} cannot be reached: {error} (the deadline was {deadline.seconds:g} s)")


# Connections to servers, kept open between callers; what one left unanswered is ended before the next is used


Admit = Callable[[Connection, Deadline], None]


class ConnectionPool:
    """Connections to servers, kept open between callers. For many threads at once."""

    def __init__(self, url: RedisUrl, admit: Admit | None = None) -> None:
        """`admit` is called with each new connection and its deadline, and raises where it may not be used."""
        self._url = url
        self._admit = admit
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Connection]] = {}
        self._abandoned: dict[Address, set[str]] = {}
        self._closed = False

    def take(self, address: Address, deadline: Deadline) -> Connection:
        """An idle connection, or a new one. Raises what `Connection` raises."""
        while True:
            with self._lock:
                if self._closed:
                    raise StoreFailed(f"the store at {self._url} is closed")
                idle = self._idle.get(address)
                if not idle:
                    break
                connection = idle.pop()
            if connection.quiet():
                return self._without_abandoned(connection, deadline)
            connection.close()
        connection = Connection(self._url, address, deadline)
        try:
            if self._admit is not None:
                self._admit(connection, deadline)
            return self._without_abandoned(connection, deadline)
        except BaseException:
            connection.close()
            raise

    def give_back(self, connection: Connection) -> None:
        """Keeps a connection on which no reply is outstanding."""
        with self._lock:
            if not self._closed:
                self._idle.setdefault(connection.address, []).append(connection)
                return
        connection.close()

    def abandon(self, connection: Connection) -> None:
        """Closes a connection that broke off; what was sent on it may still wait at the server.

        The server ends it before another connection is given out, so that late requests cannot follow newer ones.
        """
        connection.close()
        if connection.name:
            with self._lock:
                self._abandoned.setdefault(connection.address, set()).add(connection.name)

    def _without_abandoned(self, connection: Connection, deadline: Deadline) -> Connection:
        with self._lock:
            names = self._abandoned.pop(connection.address, set())
        if names:
            try:
                # Where the server does not allow that, taking over has warned of it.
                end_clients(partial(connection.call, deadline=deadline), names.__contains__)
            except BaseException:
                self.abandon(connection)
                with self._lock:
                    self._abandoned.setdefault(connection.address, set()).update(names)
                raise
        return connection

    def drop_idle(self) -> None:
        """Closes the idle connections: after one broke, the others may be dead too."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def close(self) -> None:
        """Closes what is idle now and what is given back later."""
        with self._lock:
            self._closed = True
        self.drop_idle()


def named_clients(answer: bytes) -> Iterator[tuple[str, str]]:
    """(name, number) of each connection that has a name, from the answer to CLIENT LIST."""
    for line in answer.decode(errors="replace").splitlines():
        words = dict(word.partition("=")[::2] for word in line.split(" "))
        if words.get("name") and "id" in words:
            yield words["name"], words["id"]


def end_clients(call: Callable[[list[Command]], list[Reply]], chosen: Callable[[str], bool]) -> str | None:
    """Ends connections at a server by their names; the error line where it does not allow that.

    Args:
        call: Runs commands there.
        chosen: Whether a connection of this name is to end.
    """
    (clients,) = call([("CLIENT", "LIST")])
    if isinstance(clients, hiredis.ReplyError):
        return str(clients)
    kills: list[Command] = [("CLIENT", "KILL", "ID", number) for name, number in named_clients(clients) if chosen(name)]
    answers = call(kills) if kills else []
    # 0: it was gone already.
    return next((str(answer) for answer in answers if isinstance(answer, hiredis.ReplyError)), None)


# Bulk requests and replies on several connections at once, by one thread


_WINDOW_BYTES = 1 << 19  # measured: 128 KiB starve a server, more than 1 MiB cools its cache
_MOST_BYTES = 1 << 23
_BYTES_PER_S = 2e9  # what a window lets through over a longer way


class Requests(ABC):
    """Requests to one server, encoded as they are needed.

    Attributes:
        address: The server.
        moved: int64 `[commands]`: about how many bytes each command moves, in its request and its reply.
        replies: Takes the bytes that come back.
    """

    address: Address
    moved: Int64
    replies: "Replies"

    def admit(self, connection: Connection, deadline: Deadline) -> bool:
        """Looks at the connection that was chosen, before anything is sent; False: say nothing to this server."""
        return True

    @abstractmethod
    def encode(self, start: int, stop: int) -> Sequence[Buffer]:
        """The commands `start..stop`, in pieces; called once for each, in order."""


class Replies(ABC):
    """Replies that are still to come on one connection.

    Attributes:
        failures: Command -> the error line that the server answered, without its `-`.
        completed: Commands that have been answered, whole.
        done: All replies have come.
    """

    def __init__(self) -> None:
        self.failures: dict[int, str] = {}
        self.completed = 0
        self.done = False

    @abstractmethod
    def feed(self, received: UInt8, start: int, stop: int) -> int:
        """Decodes what it can of `received[start:stop]`; returns the place of the first byte left.

        Raises:
            StoreFailed: the bytes are no reply to what was asked.
        """


def exchange(pool: ConnectionPool, talks: Sequence[Requests], deadline: Deadline) -> None:
    """Sends all requests and takes all replies.

    A server is asked for a little more while it answers what it was asked before, and never for everything at once: it
    writes the replies to a command into memory as fast as it executes it, however slowly they are sent, and megabytes
    of them wash the table out of its processor's cache. With a window on what is outstanding a lookup costs the server
    half the time. One thread suffices: it moves bytes faster than a server makes them.

    Raises:
        Unavailable, DeadlineExceeded: naming address and deadline.
        StoreFailed: a server sent what is no reply.
    """
    streams: dict[int, _Stream] = {}
    poller = select.poll()
    try:
        for requests in talks:
            connection = pool.take(requests.address, deadline)
            stream = streams[connection.socket.fileno()] = _Stream(connection, requests)
            if requests.admit(connection, deadline):
                stream.send()
            else:
                pool.give_back(streams.pop(connection.socket.fileno()).connection)
        for handle, stream in streams.items():
            poller.register(handle, stream.interest())
        while streams:
            slowest = next(iter(streams.values())).connection.address
            ready = poller.poll(1000 * deadline.left(slowest))
            if not ready:
                raise deadline.exceeded(slowest)
            for handle, events in ready:
                stream = streams[handle]
                before = stream.interest()
                stream.move(events)
                if stream.finished():
                    poller.unregister(handle)
                    pool.give_back(streams.pop(handle).connection)
                elif stream.interest() != before:
                    poller.modify(handle, stream.interest())
    finally:
        # Whatever is left here broke off in the middle: replies may still be on their way.
        for stream in streams.values():
            pool.abandon(stream.connection)


class _Stream:
    """Requests and their replies on one connection."""

    def __init__(self, connection: Connection, requests: Requests) -> None:
        self.connection = connection
        self._requests, self._replies = requests, requests.replies
        self._window = min(max(_WINDOW_BYTES, int(connection.round_trip_s * _BYTES_PER_S)), _MOST_BYTES)
        self._ends = [0, *np.cumsum(requests.moved).tolist()]  # of each command, in bytes moved
        self._made = 0  # commands encoded
        self._unsent: list[memoryview] = []
        self._start = self._stop = 0  # undecoded bytes of the inbox

    def interest(self) -> int:
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    def finished(self) -> bool:
        return self._replies.done and self._made + 1 == len(self._ends) and not self._unsent

    def move(self, events: int) -> None:
        """Does what the socket is ready for."""
        if events & select.POLLOUT:
            self.send()
        if events & ~select.POLLOUT:
            self._receive()

    def send(self) -> None:
        """Sends what the window and the socket have room for."""
        while True:
            if self._unsent:
                self._unsent = without_sent(self._unsent, self.connection.send(self._unsent))
                if self._unsent:
                    return
            stop = self._room_up_to()
            if stop == self._made:
                return
            self._unsent = _views(self._requests.encode(self._made, stop))
            self._made = stop

    def _room_up_to(self) -> int:
        """The command before which the window ends; no new ones before half of it is free."""
        done = self._replies.completed
        if self._ends[self._made] - self._ends[done] > self._window // 2 and self._made - done > 1:
            return self._made
        stop = bisect_right(self._ends, self._ends[done] + self._window) - 1
        return min(max(stop, self._made + 1), len(self._ends) - 1)

    def _receive(self) -> None:
        """Receives what has come, decodes what is whole, and asks for more."""
        connection, replies = self.connection, self._replies
        while received := connection.receive(self._stop):
            self._stop += received
            self._start = replies.feed(connection.inbox, self._start, self._stop)
            if replies.done and self._start < self._stop:
                raise StoreFailed(f"redis at {connection.address} sent more than it was asked for")
            self._make_room()
            self.send()
            if not connection.holds_decrypted():
                return

    def _make_room(self) -> None:
        """Moves the undecoded rest to the front; doubles an inbox that one row fills."""
        inbox, rest = self.connection.inbox, self._stop - self._start
        if self._start:
            inbox[:rest] = inbox[self._start : self._stop].copy()
        elif rest == len(inbox):
            self.connection.inbox = np.empty(2 * len(inbox), np.uint8)
            self.connection.inbox[:rest] = inbox
        self._start, self._stop = 0, rest
