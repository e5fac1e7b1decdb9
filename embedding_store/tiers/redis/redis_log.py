"""The write-ahead log of a store in Redis: a Redis Stream."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count
from typing import NoReturn

import hiredis

from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.errors import (
    BadInput,
    DeadlineExceeded,
    ElastableError,
    NotReady,
    StaleVersion,
    StoreBroken,
    StoreFailed,
    Unavailable,
)
from elastable.embedding_store.log.contract import Buffer, Log, LogEntry, require_kept, require_next
from elastable.embedding_store.log.framing import Header
from elastable.embedding_store.log.inspection import LogReport, counted, entry_of_version
from elastable.embedding_store.tiers.redis.connection import Connection, Deadline
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.reply_shapes import Command, Reply, first_error, packed_command, reply_error
from elastable.embedding_store.tiers.redis.schema import log_key, owner_key
from elastable.embedding_store.tiers.redis.stream_records import (
    LAST_PART,
    MAX_ENTRY_BYTES,
    NewEntry,
    StreamEnd,
    ends_questions,
    first_part,
    joined_entries,
    part_of,
    read_ends,
    stream_entries,
)
from elastable.embedding_store.tiers.redis.topology import until_deadline
from elastable.embedding_store.tiers.redis.url import RedisUrl

_MOST_REPLY_BYTES = 1 << 20


class _Superseded(NotReady):
    """The owner's key was written since it was watched; who the owner is has to be read again."""


class StreamAppender:
    """The connection that appends. For one thread at a time.

    Attributes:
        end: The newest entry, as far as this process knows; any thread may read it.
    """

    def __init__(self, place: RedisPlace, name: str) -> None:
        """`name`: of the log, for messages."""
        self.end = StreamEnd()
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

        until_deadline(attempt_round, again, deadline, self._place.url)

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
            if (error := first_error(answers)) is not None:
                raise self._refusal("cannot be appended to", error)
            self._place.require(owner)
            self._owned_by = owner
            *_, found = read_ends(stream, self._name)
            if found == self.end:
                return False
            doubtful = self._doubt
            if doubtful is None or (found.last, found.check) != (doubtful.sequence, doubtful.check):
                self._refuse_end(found)
            if entry is not None and entry.header() == doubtful:
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


class RedisLog(Log):
    """Entries in the stream `{namespace}:log`; `stream_records` has their form.

    Opening it only reads. The first change takes the store over, unless the place has done so already. An entry is as
    durable as the server makes it (`appendfsync`, replicas); `sync` waits for its append-only file.
    """

    def __init__(self, place: RedisPlace | RedisUrl | str) -> None:
        """Opens the log; there may be no entry yet.

        Args:
            place: Where it is; a `RedisPlace` is shared with the tier, and left open by `close`.

        Raises:
            BadInput: no such URL can be.
            StoreBroken: the stream is not one of a log.
            StoreFailed, Unavailable, DeadlineExceeded: the server cannot be asked.
        """
        self._place = place if isinstance(place, RedisPlace) else RedisPlace(place)
        self._shared = isinstance(place, RedisPlace)
        url = self._place.url
        self._key = log_key(url.namespace)
        self._name = f"the log of the store at {url} (namespace {url.namespace!r})"
        self._appending = threading.Lock()
        self._closed = False
        self._first, self._before = 1, 0  # the oldest entry, and the bytes of all before it
        self._read = StreamEnd(-1)  # the entry that was read last
        self._appender = StreamAppender(self._place, self._name)
        self._server, self._reached = b"", 0
        try:
            started = [(self._key, words) for words in START_QUESTIONS]
            self._server = server_start(self._place.topology.call(started, self._place.deadline()))
            self._reached = self._last_id()
            self.refresh()
        except BaseException:
            self.close()
            raise

    @property
    def first(self) -> int:
        return self._first

    @property
    def last(self) -> int:
        return self._appender.end.last

    @property
    def reached(self) -> int:
        """The stream remembers its last id although its entry is gone."""
        return max(self._reached, self.last)

    def check_at(self, sequence: int) -> int | None:
        end = self._appender.end
        if sequence == end.last:
            return end.check if sequence else None
        part = first_part(self._place.topology, self._name, self._last_part_of(sequence), self._place.deadline())
        return None if part is None or part.header is None else part.header.check

    @property
    def bytes(self) -> int:
        return self._appender.end.total - self._before

    def refresh(self) -> None:
        """Reads anew where the log begins and ends, as another process may have changed it.

        Raises:
            StoreBroken, StoreFailed, Unavailable, DeadlineExceeded: as when the log was opened.
        """
        with self._appending:
            self._require_open()
            deadline = self._place.deadline()
            self._appender.settle(deadline)
            questions = [(self._key, words) for words in ends_questions(self._key)]
            found = read_ends(self._place.topology.call(questions, deadline), self._name)
            self._first, self._before, self._appender.end = found

    def append(self, sequence: int, version: int, parts: Sequence[Buffer]) -> None:
        with self._appending:
            self._require_open()
            end = self._appender.end
            require_next(sequence, end.last, self._name)
            entry = NewEntry.of(sequence, version, parts, end.total, end.check)
            if entry.length > MAX_ENTRY_BYTES:
                raise StoreFailed(
                    f"{self._name}: entry {sequence} takes {entry.length:,} bytes, and Redis takes {MAX_ENTRY_BYTES:,} "
                    "at once: change fewer rows at a time"
                )
            self._appender.append(entry, self._place.deadline())

    def entries(self, after: int = 0) -> Iterator[LogEntry]:
        """As of `Log`, up to the newest entry that is known; `refresh` learns of those that another process appended.

        Raises:
            StaleVersion: the entry `after`, which was read from this object before, has been taken back since.
        """
        with self._appending:
            self._require_open()
        first, end, read = self.first, self._appender.end, self._read
        last, previous = end.last, read.check if read.last == after else None
        if previous is not None and (last < after or (last == after and end.check != previous)):
            raise self._taken_back(after)
        if after >= last:
            return
        if first > after + 1:
            raise self._trimmed(first, after)
        sequence = after
        try:
            for entry, header in self._between(after, last):
                if previous is not None and header.previous != previous:
                    raise self._taken_back(sequence)
                sequence, previous = entry.sequence, header.check
                self._read = StreamEnd(sequence, header.check)
                yield entry
            if sequence < last:
                raise StoreBroken(f"{self._name} is corrupt: entries {sequence + 1} to {last} are missing")
        except StoreBroken as error:
            raise self._changed_while_read(sequence, last) or error from error

    def sync(self) -> None:
        """Waits until the server's append-only file is on its disk, where it has one (Redis 7.2, Valkey)."""
        with self._appending:
            self._require_open()
            self._appender.sync(self._place.deadline())

    def trim(self, through: int) -> None:
        """Removes entries; `through` itself stays, as what follows names it, and so does the newest one.

        Whatever made them unnecessary is on the same server. One that was started again since the last call, or since
        the log was opened, may have come back without it: nothing is removed then before the next call.
        """
        self._require_open()
        keep, deadline = min(through, self.last), self._place.deadline()
        if keep <= self.first:
            return

        def trimmed(answers: list[Reply]) -> list[Command]:
            if not answers.pop():
                raise StoreBroken(f"{self._name} is corrupt: entry {keep} is missing, which was appended")
            before, self._server = self._server, server_start(answers)
            return [("XTRIM", self._key, "MINID", "=", b"%d-0" % keep)] if before == self._server else []

        self._place.change([*START_QUESTIONS, self._last_part_of(keep)], trimmed, deadline)
        oldest = first_part(self._place.topology, self._name, ends_questions(self._key)[0], deadline)
        if oldest is not None and oldest.sequence <= self.last:
            self._first, self._before = oldest.sequence, oldest.begin

    def truncate(self, after: int) -> None:
        """Takes entries back; entry `after` has to be in the log, unless nothing was trimmed and it is 0."""
        with self._appending:
            self._require_open()
            deadline = self._place.deadline()
            require_kept(after, self.first, self._name)
            self._appender.settle(deadline)
            if after >= self.reached:
                return
            part = first_part(self._place.topology, self._name, self._last_part_of(after), deadline) if after else None
            if after and (part is None or part.header is None):
                raise StoreBroken(f"{self._name} is corrupt: the last part of entry {after} is missing")
            self._appender.cut(StreamEnd() if part is None else StreamEnd.of(part), deadline)
            self._reached = 0

    def close(self) -> None:
        with self._appending:
            if self._closed:
                return
            self._closed = True
            self._appender.drop()
            if not self._shared:
                self._place.close()

    def _between(self, after: int, last: int) -> Iterator[tuple[LogEntry, Header]]:
        found = stream_entries(self._place.topology, b"%d-0" % (after + 1), b"%d-%d" % (last, LAST_PART))
        return joined_entries((part_of(entry, self._name) for entry in found), after + 1, self._name)

    def _changed_while_read(self, sequence: int, last: int) -> ElastableError | None:
        """Why the entry after `sequence` cannot be read, if another process has trimmed or cut the log meanwhile."""
        self.refresh()
        if self.first > sequence + 1:
            return self._trimmed(self.first, sequence)
        return self._taken_back(self.last) if self.last < last else None

    def _trimmed(self, first: int, after: int) -> BadInput:
        return BadInput(f"{self._name} begins with entry {first}: those after {after} were trimmed")

    def _taken_back(self, sequence: int) -> StaleVersion:
        return StaleVersion(f"{self._name}: entry {sequence} or one after it was taken back since it was read")

    def _last_id(self) -> int:
        """The sequence number in the greatest id that the stream has given; 0: there is no stream."""
        call, deadline = self._place.topology.call, self._place.deadline()
        if not call([(self._key, ("EXISTS", self._key))], deadline)[0]:
            return 0
        (about,) = call([(self._key, ("XINFO", "STREAM", self._key))], deadline)
        last = dict(zip(about[::2], about[1::2], strict=True)).get(b"last-generated-id")
        return int(last.partition(b"-")[0]) if isinstance(last, bytes) and last[:1].isdigit() else 0

    def _last_part_of(self, sequence: int) -> Command:
        """Asks for the last part of an entry."""
        return ("XREVRANGE", self._key, b"%d-%d" % (sequence, LAST_PART), b"%d-0" % sequence, "COUNT", 1)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreFailed(f"{self._name} is closed")


# Whether a server is still the one it was: started only once, and never replaced by its replica meanwhile


START_QUESTIONS: Sequence[Command] = (("INFO", "server"), ("INFO", "replication"))
"""Commands whose answers `server_start` reads."""

_FIELDS = (b"run_id:", b"master_replid:")  # another one after a start; another one after a failover


def server_start(answers: Sequence[bytes]) -> bytes:
    """What changes when the server may have lost what it had; b"" where the server does not say."""
    return b" ".join(line for answer in answers for line in answer.splitlines() if line.startswith(_FIELDS))


# What the log of a store in Redis holds, and how it is taken back to a version while no store is open


_ATTEMPTS = 5


def inspect_redis_log(url: str) -> LogReport:
    """Reads and checks every entry of a log; nothing is taken over or changed.

    The store may go on meanwhile; what it appends during the call may be missing here.

    Raises:
        BadInput: no such URL can be, or no store has a log there.
        StoreBroken: an entry is corrupt or missing, or the log and the rows of the store do not fit.
        StoreFailed, Unavailable, DeadlineExceeded: the server cannot be asked.
    """
    with closing(RedisPlace(url)) as place, RedisTier(place) as tier, RedisLog(place) as log:
        for attempt in count(1):
            try:
                return _report(tier, log)
            except BadInput:
                if attempt == _ATTEMPTS or not log.last:
                    raise  # else it was trimmed while it was read
    raise AssertionError("unreachable")


def _report(tier: RedisTier, log: RedisLog) -> LogReport:
    written = max(_flushed(tier)[0], tier.sequence, log.reached)
    log.refresh()
    first, last, size = log.first, log.last, log.bytes
    flushed, version = _flushed(tier)  # the log is never trimmed beyond that
    if not last and not flushed:
        raise BadInput(f"{tier.place} holds no log")
    if first > flushed + 1 or last < written:
        raise StoreBroken(
            f"{tier.place} is incomplete: its rows or stream tell of log entries up to {written}, its state of those "
            f"up to {flushed}, and its log holds {first} to {last}"
        )
    newest, changes, rows = counted(log.entries(after=first - 1), version)
    return LogReport(None, version, 0, first, last, newest, size, 0, changes, rows, flushed)


def truncate_redis_log(url: str, version: int) -> int:
    """Takes every change after a version back from the log; how many rows these changes had written.

    Raises:
        StoreFailed: a store has the log open.
        StaleVersion: rows of later versions are in the store already.
        StoreBroken: the log is corrupt before that version.
    """
    with closing(RedisPlace(url)) as place, RedisTier(place) as tier, RedisLog(place) as log:
        writer = place.other_writer()
        if writer is not None:
            raise StoreFailed(f"{tier.place} is open in process {writer}: end it first")
        place.take_over()
        log.refresh()
        flushed, flushed_version = _flushed(tier)
        keep, rows = entry_of_version(log, flushed, version)
        if flushed_version > version or tier.sequence > keep:
            raise StaleVersion(
                f"{tier.place} cannot go back to version {version}: rows of later versions are written; "
                "restore a checkpoint"
            )
        log.truncate(keep)
        return rows


def _flushed(tier: RedisTier) -> tuple[int, int]:
    """Up to which entry, and to which version, every row is in the tier."""
    content = tier.state()
    if content is None:
        return 0, 0
    state = StoreState.from_bytes(content, tier.place)
    return state.sequence, state.version
