"""Appends to the log of a store in Redis: one round trip an entry, each entry exactly once, and by one process only.

The connection that appends watches the owner's key (`WATCH`), so that Redis itself refuses a transaction of a process
that is not the owner any more. What watches for the next append is sent with the one before:

    MULTI  XADD ...  EXEC  WATCH <owner>  GET <owner>

If the connection breaks before EXEC was answered, nobody knows whether the entry is there, or will be yet. The owner's
key is written anew then, with the same value: what the server still has to execute of that connection fails by its
WATCH. After that the stream's newest entry tells.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NoReturn

import hiredis

from elastable.embedding_store.errors import (
    DeadlineExceeded,
    ElastableError,
    NotReady,
    StaleVersion,
    StoreBroken,
    Unavailable,
)
from elastable.embedding_store.log.contract import Buffer
from elastable.embedding_store.log.framing import Header
from elastable.embedding_store.support.retry import Retry
from elastable.embedding_store.tiers.redis.connections.redis_connection import Connection, Deadline
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command, packed_command, reply_error
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.schema import log_key, owner_key
from elastable.embedding_store.tiers.redis.streams.stream_records import (
    LAST_PART,
    NewEntry,
    StreamEnd,
    ends_questions,
    read_ends,
    stream_entries,
)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_MOST_REPLY_BYTES = 1 << 20


class _Superseded(NotReady):
    """The owner's key was written since it was watched; who the owner is has to be read again."""


class StreamAppender:
    """The connection that appends. For one thread at a time.

    Attributes:
        end: The newest entry, as far as this process knows.
    """

    def __init__(self, place: RedisPlace, name: str, end: StreamEnd) -> None:
        """`name`: of the log, for messages; `end`: as it was read when the log was opened."""
        self.end = end
        self._place, self._name = place, name
        self._key, self._owner = log_key(place.url.namespace), owner_key(place.url.namespace)
        self._connection: Connection | None = None
        self._owned_by: bytes | None = None
        self._doubt: Header | None = None  # of an entry of which nobody knows whether it is in the stream
        self._settled = False  # it cannot get there any more

    def append(self, entry: NewEntry, deadline: Deadline) -> None:
        """Appends the entry after `end`.

        Raises:
            TakenOver: another process owns the store.
            StoreBroken: the stream is not what this process left.
            StoreFailed: the server refuses the entry; the log is as it was.
            Unavailable, DeadlineExceeded: no answer; the next call finds out whether the entry is there, and takes it
                back unless it is that very entry.
        """
        self._until_done(lambda: self._attempt(entry, deadline), deadline)

    def settle(self, deadline: Deadline) -> None:
        """Takes the last entry back if it is there although its `append` failed. Raises what `append` raises."""
        if self._doubt is not None:
            self._until_done(lambda: self._connected(None, deadline), deadline)

    def cut(self, end: StreamEnd, deadline: Deadline) -> None:
        """Makes `end`, an earlier entry, the newest one. Raises what `append` raises."""
        self._until_done(lambda: cut_stream(self._place, end, deadline), deadline)
        self.end = end

    def sync(self, deadline: Deadline) -> None:
        """Waits until everything is in the server's append-only file on disk; not where it keeps none.

        Raises:
            DeadlineExceeded: it is not there yet.
            What `append` raises.
        """
        self._until_done(lambda: self._sync(deadline), deadline)

    def drop(self) -> None:
        """Closes the connection; the next append opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _until_done(self, attempt: Callable[[], object], deadline: Deadline) -> None:
        """Attempts until the deadline while the server is away or its keys move."""
        rounds = count()

        def attempt_round() -> None:
            if next(rounds):
                for servers in (self._place.topology, self._place.writing(deadline)):
                    servers.pool.drop_idle()
                    servers.refresh(deadline)
            try:
                attempt()
            except BaseException:
                self.drop()  # it may have broken off in the middle of a request
                raise

        def again(error: Exception) -> bool:
            return isinstance(error, Unavailable) and not isinstance(error, DeadlineExceeded)

        Retry(
            math.inf,  # `left` raises once the deadline has passed
            again,
            first_pause_s=_FIRST_PAUSE_S,
            longest_pause_s=_LONGEST_PAUSE_S,
            pause=lambda seconds: time.sleep(min(seconds, deadline.left(self._place.url))),
        ).call(attempt_round)

    def _attempt(self, entry: NewEntry, deadline: Deadline) -> None:
        connection = self._connected(entry, deadline)
        if connection is None:
            return  # the entry in doubt was this one, and it is there
        sent: list[Header] = []
        ids = entry.ids
        try:
            answers = connection.converse(self._requests(entry, sent), len(ids) + 4, deadline, _MOST_REPLY_BYTES)
        except BaseException:
            self._doubt, self._settled = (sent[0] if sent else None), False
            raise
        executed = answers[len(ids) + 1]
        if executed is None:
            raise _Superseded(f"the owner of {self._name} has changed")
        self._refuse_errors(answers, ids)
        self.end = StreamEnd(entry.sequence, sent[0].check, entry.begin + sent[0].entry_bytes, ids[-1])
        if answers[-2] != b"OK" or answers[-1] != self._owned_by:
            self.drop()  # the next append finds out why

    def _requests(self, entry: NewEntry, sent: list[Header]) -> Iterator[list[Buffer]]:
        """What to send; `sent` gets the header once EXEC may be on its way."""
        for pieces, header in entry.requests(self._key):
            if header is None:
                yield pieces
            else:
                sent.append(header)
                yield [*pieces, packed_command(("WATCH", self._owner)), packed_command(("GET", self._owner))]

    def _refuse_errors(self, answers: Sequence[object], ids: Sequence[bytes]) -> None:
        executed = answers[len(ids) + 1]
        for answer in answers[: len(ids) + 2]:
            if isinstance(answer, hiredis.ReplyError):
                raise self._refusal(f"does not take entry {ids[0].decode()}", str(answer))
        if executed != ids:
            # Redis executes the rest of a transaction where one command of it fails.
            raise StoreBroken(f"{self._name} was changed by another program: {repr(executed)[:200]} instead of {ids}")

    def _sync(self, deadline: Deadline) -> None:
        """WAITAOF waits for what its connection has written last: that is made younger than every entry."""
        connection = self._connected(None, deadline)
        assert connection is not None
        assert self._owned_by is not None
        milliseconds = max(1, int(1000 * deadline.left(self._name)) - 100)
        changed = [("MULTI",), ("SET", self._owner, self._owned_by), ("EXEC",)]
        waited = [("WAITAOF", 1, 0, milliseconds), ("WATCH", self._owner), ("GET", self._owner)]
        *_, executed, synced, watched, owner = connection.call([*changed, *waited], deadline)
        if watched != b"OK" or owner != self._owned_by:
            self.drop()
        if executed is None:
            raise _Superseded(f"the owner of {self._name} has changed")
        if isinstance(executed, hiredis.ReplyError):
            raise self._refusal("cannot be written", str(executed))
        if isinstance(synced, list) and synced[:1] == [0]:
            raise deadline.exceeded(f"{self._place.url}, whose append-only file is not on its disk yet")

    def _connected(self, entry: NewEntry | None, deadline: Deadline) -> Connection | None:
        """The connection, watching the owner's key; None: `entry` was in doubt, and is there."""
        if self._connection is not None and not self._connection.quiet():
            self.drop()
        if self._connection is not None and self._doubt is None:
            return self._connection
        self.drop()
        if self._doubt is not None and not self._settled:
            self._place.change([("GET", self._owner)], lambda answers: [("SET", self._owner, answers[0])], deadline)
            self._settled = True
        servers = self._place.writing(deadline)
        connection = servers.pool.take(servers.address_of(self._key), deadline)
        try:
            is_there = self._look(connection, entry, deadline)
        except BaseException:
            connection.close()
            raise
        self._connection, self._doubt = connection, None
        return None if is_there else connection

    def _look(self, connection: Connection, entry: NewEntry | None, deadline: Deadline) -> bool:
        """Watches the owner's key, and makes sure of owner and stream. Whether `entry` was in doubt, and is there."""
        questions: list[Command] = [("WATCH", self._owner), ("GET", self._owner), *ends_questions(self._key)]
        while True:
            _, owner, *stream = answers = connection.call(questions, deadline)
            for answer in answers:
                if isinstance(answer, hiredis.ReplyError):
                    raise self._refusal("cannot be appended to", str(answer))
            self._place.require(owner)
            self._owned_by = owner
            found = read_ends(stream, self._name).end
            if found == self.end:
                return False
            doubtful = self._doubt
            if doubtful is None or (found.last, found.check) != (doubtful.sequence, doubtful.check):
                self._refuse_end(found)
            if entry is not None and entry.header()[1] == doubtful:
                self.end = found
                return True
            cut_stream(self._place, self.end, deadline)

    def _refuse_end(self, found: StreamEnd) -> NoReturn:
        if found.last > self.end.last:
            raise StaleVersion(f"{self._name} has grown to entry {found.last} since it was opened: open it again")
        raise StoreBroken(
            f"{self._name} ends with entry {found.last}, and {self.end.last} was appended: the server has lost what "
            "was written last. Was it restarted without its append-only file, failed over, or flushed?"
        )

    def _refusal(self, what: str, line: str) -> ElastableError:
        """The error for an error line; `Unavailable` where another attempt may succeed."""
        if self._place.topology.passes(line):
            return NotReady(f"{self._name} {what}: {line}")
        return reply_error(f"{self._name} {what}", line, self._place.url)


# Takes the newest entries of the log of a store in Redis back, so that their numbers can be used again


_GREATEST_ID = b"%d-%d" % (LAST_PART, LAST_PART)
_AT_ONCE = 1_000  # stream ids in one XDEL


def cut_stream(place: RedisPlace, end: StreamEnd, deadline: Deadline) -> None:
    """Makes `end` the newest entry, in one transaction. To repeat it does no harm.

    Raises:
        TakenOver: another process owns the store.
        StoreFailed, Unavailable, DeadlineExceeded: it may have been done where the connection broke.
    """
    key = log_key(place.url.namespace)
    ids = [entry[0] for entry in stream_entries(place.topology, b"%d-0" % (end.last + 1), b"+")]
    chunks = [ids[at : at + _AT_ONCE] for at in range(0, len(ids), _AT_ONCE)]
    # Redis lets a stream's last id not go below its greatest deleted one: that has to be lowered first.
    lowered: list[Command] = [("XSETID", key, _GREATEST_ID, "MAXDELETEDID", end.id), ("XSETID", key, end.id)]
    commands: list[Command] = [*(("XDEL", key, *chunk) for chunk in chunks), *lowered] if end.last else [("DEL", key)]
    place.change([], lambda _: commands, deadline)
