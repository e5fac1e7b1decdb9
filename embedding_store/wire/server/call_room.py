"""Limits of a gRPC server's calls: threads, waits, bytes and rates, and who has to leave where there is no room."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import grpc

from elastable.embedding_store.support.memory_budget import HeldBytes, return_freed_memory
from elastable.embedding_store.wire.channels.status_codes import CallRefused

_LOOK_S = 0.5  # between two looks at who is late
_FAIR_S = 1.0  # that any call may wait, however many do
_SHORT_S = 0.05  # that any call may wait, where others find no room


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Calls that share a limit: `name`, in messages, and how many of them may be under way at once."""

    name: str
    most: int


@dataclass(slots=True, eq=False)
class Call:
    """One call, and what it counts as; "" is a host or client that is not known.

    Attributes:
        waits_as: What it counts as while it waits for something to happen here.
        counts: What it counts among now; these names are in messages.
        stays: What it counts among until it ends, however it waits.
        identity: What its caller is known by, at a server that tells callers apart.
        received: Bytes of its request.
        answered: Whether all of its answer was made.
    """

    context: grpc.ServicerContext
    kind: Kind
    waits_as: Kind
    host: str = ""
    client: str = ""
    identity: str = ""
    counts: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()
    received: int = 0
    answered: bool = False

    @property
    def code(self) -> str:
        """Name of its status code, once it has ended."""
        code = self.context.code()  # type: ignore[attr-defined]
        if code is None:
            return (grpc.StatusCode.OK if self.answered else grpc.StatusCode.CANCELLED).name
        return code.name if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN.name


@dataclass(slots=True, eq=False)
class _Wait:
    """One call that waits for its client, since when, and until when it may."""

    call: Call
    since: float
    until: float


class CallRoom:
    """The room of one server. Safe to use from many threads.

    Args:
        limits: Of the server.
        spare: Calls that may be under way above `limits.threads`: health checks, and refusals.
    """

    def __init__(self, limits: "CallLimits", spare: int) -> None:
        self._limits = limits
        self.health = Kind("health checks", max(1, spare // 2))
        self.rare = Kind("questions about services", max(1, spare // 4))
        self.work = Kind("calls", limits.threads)
        self.joining = Kind("sessions being opened", max(1, limits.threads * 5 // 8))
        self.sessions = Kind("sessions", limits.sessions)
        self.parked = Kind("waiting calls", limits.parked)
        self.answers = Kind("answers", limits.answering)
        self.unread = Kind("unread answers", limits.threads)
        self._rates = CallRates(limits.calls_a_second_of_a_client)
        self._lock = threading.Lock()
        self._under_way: dict[str, int] = {}  # calls by what they count among
        self._most_leaving = max(1, spare // 2)
        self._leaving: set[Call] = set()  # calls that were ended for others, and hold their room yet
        self._receiving: dict[Call, None] = {}  # calls with bytes, the oldest first
        self._received, self._unread = (
            HeldBytes(limits.upload_bytes, limits.upload_bytes_of_a_client) for _ in range(2)
        )
        self._given_up = False  # whether answers were, whose memory is to be given back
        self._waits: dict[object, _Wait] = {}  # the one that has waited longest first
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="elastable-late-calls", daemon=True).start()

    def close(self) -> None:
        """Calls are waited for again as long as they take. Closing twice is harmless."""
        self._closed.set()

    def call(self, kind: Kind, context: grpc.ServicerContext) -> Call:
        """A call that has not entered yet."""
        return Call(context, kind, self.sessions if kind is self.joining else self.parked)

    def enter(self, call: Call) -> None:
        """Counts a call, before a message of it is read.

        Raises:
            CallRefused: there is no room for it.
        """
        counts, stays, of_host, all_sessions = {call.kind.name: call.kind.most}, dict[str, int](), {}, {}
        if call.kind is self.work:
            stays = self._of_client(call)
            of_host = {f"calls from {call.host}": self._limits.of_a_host}
        elif call.kind is self.joining:
            stays, all_sessions = self._of_session(call), {self.sessions.name: self.sessions.most}
            counts[self.work.name] = self.work.most  # both take their threads from `CallLimits.threads`
        with self._lock:
            why, silent = self._full(all_sessions) or self._full(stays), None
            full, crowded = self._full(counts), self._full(of_host)
            if not why and (full or crowded):
                silent = self._most_silent(call, of_its_host=bool(crowded))
                if silent is None:
                    why = full or crowded
            if not why:
                call.counts, call.stays = (*counts, *of_host), (*stays,)
                self._count(call.counts, 1)
                self._count(call.stays, 1)
        if silent is not None:
            silent.context.cancel()  # type: ignore[no-untyped-call]
        if why:
            raise _refused(why)

    def park(self, call: Call) -> None:
        """Counts the call as one that waits from now on, and holds no thread.

        Raises:
            CallRefused: too many do.
        """
        kind, of_host = call.waits_as, f"{call.waits_as.name} from {call.host}"
        stays = {of_host: self._limits.parked_of_a_host} if kind is self.parked and of_host not in call.stays else {}
        with self._lock:
            if not (why := self._full({kind.name: kind.most, **stays})):
                self._leaving.discard(call)
                self._count(stays, 1)
                call.stays += (*stays,)
                self._move(call, kind)
        if why:
            raise _refused(why)

    def answer(self, call: Call) -> None:
        """Counts a call that has waited as one that is answered."""
        with self._lock:
            self._move(call, self.answers)

    def leave(self, call: Call) -> None:
        """Gives the place of a call back that has ended."""
        with self._lock:
            self._leaving.discard(call)
            self._count(call.counts, -1)
            self._count(call.stays, -1)
            call.counts = call.stays = ()
            if self._receiving.pop(call, call) is None:
                self._received.add(call.client, -call.received)
                call.received = 0

    def receive(self, call: Call, size: int) -> None:
        """Counts bytes of the call's request, until it leaves.

        Raises:
            CallRefused: there are too many, and other requests came before.
        """
        with self._lock:
            call.received += size
            self._receiving.setdefault(call)
            self._received.add(call.client, size)
            full = None if call is next(iter(self._receiving)) else self._received.full(call.client)
        if full is not None:
            of = f" from {full}" if full else ""
            raise _refused(f"requests of {self._received.held(full) - size} bytes{of}")

    def answered(self, call: Call, size: int) -> None:
        """Counts the one message of an answer until its client has read it, which it must within `unread_s`.

        Raises:
            CallRefused: too much is not read yet, of all clients or of this one.
        """
        key, client = object(), call.client
        now, unread = time.monotonic(), replace(call, kind=self.unread)
        self._take_unread(client, size)
        with self._lock:
            self._waits[key] = _Wait(unread, now, now + self._limits.unread_s)

        def over() -> None:
            with self._lock:
                self._unread.add(client, -size)
                self._waits.pop(key, None)
                self._given_up |= now + _LOOK_S < time.monotonic()

        if not call.context.add_callback(over):
            over()

    @contextmanager
    def sending(self, call: Call, size: int, seconds: float) -> Iterator[None]:
        """Around the sending of one message of an answer of several, for which its client has `seconds` to make room.

        Args:
            size: Bytes that count as unread meanwhile.

        Raises:
            CallRefused: as `answered`.
        """
        self._take_unread(call.client, size)
        try:
            with self.waiting(call, seconds):
                yield
        finally:
            given_up = size > 0 and not call.context.is_active()
            with self._lock:
                self._unread.add(call.client, -size)
                self._given_up |= given_up

    def _take_unread(self, client: str, size: int) -> None:
        with self._lock:
            if (of := self._unread.full(client, size)) is not None:
                raise _refused(f"unread answers{of and f' of {of}'} of {self._unread.held(of)} bytes")
            self._unread.add(client, size)

    @contextmanager
    def waiting(self, call: Call, seconds: float) -> Iterator[None]:
        """Around a wait for the client, which is ended after `seconds`, or where too many wait."""
        key, now = object(), time.monotonic()
        with self._lock:
            self._waits[key] = _Wait(call, now, now + seconds)
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop(key, None)

    def _of_client(self, call: Call) -> dict[str, int]:
        """Bounds of its client's calls. Raises `CallRefused`: they come too fast."""
        call.client = call.context.peer()
        call.host = _host_of(call.client)
        most = self._limits.calls_a_second_of_a_client
        if not self._rates.take(call.client):
            raise CallRefused(f"the client {call.client} makes more than {most:g} calls a second; try again")
        return {f"calls of the client {call.client}": self._limits.calls_of_a_client}

    def _of_session(self, call: Call) -> dict[str, int]:
        """Bounds of sessions, but for that of all."""
        peer, limits = call.context.peer(), self._limits
        bounds = {
            f"sessions of the client {peer}": limits.sessions_of_a_client,
            f"sessions from {_host_of(peer)}": limits.sessions_of_one,
        }
        return {**bounds, f"sessions of {call.identity}": limits.sessions_of_one} if call.identity else bounds

    def _full(self, bounds: Mapping[str, int]) -> str:
        """The first of these bounds that is reached; "": none."""
        for whose, most in bounds.items():
            if self._under_way.get(whose, 0) >= most:
                return f"{most} {whose}"
        return ""

    def _count(self, among: Iterable[str], one: int) -> None:
        """Adds to counts, which are forgotten once they are 0."""
        for name in among:
            if count := self._under_way.get(name, 0) + one:
                self._under_way[name] = count
            else:
                del self._under_way[name]

    def _move(self, call: Call, kind: Kind) -> None:
        """Counts the call as one of another kind."""
        self._count(call.counts, -1)
        call.kind, call.counts = kind, (kind.name,)
        self._count(call.counts, 1)

    def _most_silent(self, call: Call, of_its_host: bool) -> Call | None:
        """The call that has waited longest for its client, and that is to make room for another one of its kind.

        Else whoever opens calls and says nothing takes all room of its host again as fast as it is given back.
        """
        if len(self._leaving) >= self._most_leaving:
            return None
        before = time.monotonic() - _SHORT_S
        for key, wait in self._waits.items():
            if wait.since > before:
                return None
            if wait.call.kind is call.kind and (not of_its_host or wait.call.host == call.host):
                del self._waits[key]
                self._leaving.add(wait.call)
                return wait.call
        return None

    def _look(self) -> None:
        """Ends late calls until the server is closed, and the oldest where too many wait."""
        while not self._closed.wait(_LOOK_S):
            now = time.monotonic()
            with self._lock:
                given_up, self._given_up = self._given_up, False
                if not (self._waits or given_up):
                    continue
                ended = [key for key, wait in self._waits.items() if wait.until < now]
                for kind in (self.health, self.rare, self.joining, self.work, self.answers, self.unread):
                    alike = [key for key, wait in self._waits.items() if wait.call.kind is kind and key not in ended]
                    surplus = len(alike) - min(kind.most // 2, self._limits.waiting)
                    ended += [key for key in alike[: max(surplus, 0)] if self._waits[key].since < now - _FAIR_S]
                waits = [self._waits.pop(key) for key in ended]
                self._given_up |= bool(waits)
            for wait in waits:
                wait.call.context.cancel()  # type: ignore[no-untyped-call]
            if given_up:
                return_freed_memory()


def _host_of(peer: str) -> str:
    return peer.rpartition(":")[0] or peer  # gRPC names a peer `ipv4:127.0.0.1:50051`


def _refused(why: str) -> CallRefused:
    return CallRefused(f"{why} are under way here; try again")


# How many calls a second each client of a server makes


_BURST_S = 1.0  # for whose calls a client that was silent has room at once
_REMEMBERED = 4_096  # clients, before those that are within their rate are forgotten


class CallRates:
    """The rates of one server's clients, each a token bucket that holds a second's calls.

    Safe to use from many threads.

    Args:
        most: Calls a second of one client; None: any number.
        clock: Seconds that never go back.
    """

    def __init__(self, most: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._lock = threading.Lock()
        self._paid: dict[str, float] = {}  # client -> the time until which its calls use up its rate

    def take(self, client: str) -> bool:
        """Whether a client may make one more call now, which is then counted."""
        if self._most is None:
            return True
        now, each = self._clock(), 1.0 / self._most
        with self._lock:
            paid = max(now, self._paid.get(client, now)) + each
            if paid > now + max(_BURST_S, each):
                return False
            if client not in self._paid and len(self._paid) >= _REMEMBERED:
                self._paid = {one: until for one, until in self._paid.items() if until > now}
            self._paid[client] = paid
        return True


# The limits of one gRPC server: calls at once, and how long clients may take


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Of one server.

    A client is one connection. A call beyond a limit is refused as RESOURCE_EXHAUSTED, with the limit; clients repeat
    it with growing pauses until their deadline.

    Attributes:
        threads: Calls under way at once, but for health checks and those that wait.
        sessions: Workers whose sessions are open at once. They hold no threads.
        parked: Calls that wait for something to happen here: a task, a version, a commit. They hold no threads.
        sessions_of_a_client: Sessions of one client.
        calls_of_a_client: Calls of one client under way or waiting, sessions apart.
        calls_a_second_of_a_client: Begun by one client, sessions and health checks apart; as many may come at once.
            None: any number.
        upload_bytes: Of all requests that are being received or worked on, together; the oldest one may be larger. And
            again of all messages of answers that are not read yet. None: an eighth of the memory here, at least 1 GiB.
        upload_bytes_of_a_client: The same of one client. None: half of `upload_bytes`.
        first_message_s: Seconds that a client may take for its first message.
        next_message_s: And for each one after it.
        least_rate: Bytes a second that a stream of messages must bring on average, once `next_message_s` have passed.
        unread_s: Seconds that a client may take to make room for one more message of the answer, or to read one that is
            all of it. Messages of one answer must be read at `least_rate`, too.
    """

    threads: int = 256
    sessions: int = 4_096
    parked: int = 16_384
    sessions_of_a_client: int = 64
    calls_of_a_client: int = 128
    calls_a_second_of_a_client: float | None = None
    upload_bytes: int | None = None
    upload_bytes_of_a_client: int | None = None
    first_message_s: float = 10.0
    next_message_s: float = 30.0
    least_rate: int = 64 << 10
    unread_s: float = 20.0

    @property
    def waiting(self) -> int:
        """Calls that may wait for their clients at once."""
        return max(1, self.threads * 3 // 8)

    @property
    def of_a_host(self) -> int:
        """Calls of one host that may be under way at once, sessions and waiting calls apart."""
        return max(1, self.threads * 3 // 4)

    @property
    def sessions_of_one(self) -> int:
        """Sessions of one host, and of one token or certificate: three quarters of all."""
        return max(1, self.sessions * 3 // 4)

    @property
    def parked_of_a_host(self) -> int:
        """Waiting calls of one host: three quarters of all."""
        return max(1, self.parked * 3 // 4)

    @property
    def streams(self) -> int:
        """Of one connection at once; further calls wait at the client."""
        return self.calls_of_a_client + self.sessions_of_a_client + 16

    @property
    def answering(self) -> int:
        """Threads that answer calls which have waited."""
        return max(4, self.threads // 8)
