"""The servers and the processes of `tests.consistency.protocol`, as values that can be compared."""

from typing import NamedTuple


class Broken(AssertionError):
    """A promise is broken in a state that can be reached."""


Row = tuple[str, ...]
"""The commits that were applied to it, such as "1A" and "2B"."""

Cells = tuple[Row, Row]
"""The two rows of the table."""


Stamp = tuple[int, int]
"""Of a partition: the newest entry when it was written, and how many times it had been written with that entry."""

Watched = tuple[str, int, int]
"""The owner's key, how many times it was written, and how many times its server has started."""


class Entry(NamedTuple):
    """An entry of the log: the commit of version `sequence`, and the rows that it has made."""

    sequence: int  # its number
    commit: str  # its name; another attempt at the version, and another process, make another commit of it
    parts: int  # in how many stream entries it lies
    images: tuple[tuple[int, Row], ...]  # (number, row) of the rows that it has changed, as they are after it
    based_on: str = ""  # the commit of the version that its gradient was computed on; "": nobody asks


class Head(NamedTuple):
    """The server with the log, the tier's state and the owner."""

    stream: tuple[tuple[int, int, Entry], ...] = ()  # parts of entries: sequence number, part, entry
    owner: tuple[str, int] = ("A", 1)  # who may write, and how many times that was written
    flushed: int = 0  # the tier's state: rows include the entries up to this one
    stamp: Stamp = (0, 0)  # the tier's state: the partition's stamp then
    starts: int = 1  # how many times the server has started: watching ends with it

    @property
    def watched(self) -> Watched:
        """What somebody sees who watches the owner's key now."""
        return (*self.owner, self.starts)


class Partition(NamedTuple):
    """The server with the rows, and the stamp of the last write to them."""

    cells: Cells = ((), ())
    stamp: Stamp = (0, 0)


class Message(NamedTuple):
    """A request that its server has not executed yet.

    Attributes:
        writer, life: Whose, and on which of its connections.
        cell, row, stamp, known: The row, the partition's stamp from then on, and those that it may have before.
    """

    writer: str
    life: int
    watched: Watched = ("", 0, 0)  # the owner's key as it was when it was watched
    entry: Entry | None = None  # to append; None: a row is to be written
    cell: int = 0
    row: Row = ()
    stamp: Stamp = (0, 0)
    known: tuple[Stamp, ...] = ()


class Store(NamedTuple):
    """What the servers hold, and what is on its way to them.

    `open` are the writers with a named connection to the partition. Nobody in it knows `lineage`, the entries that
    make the newest version, trimmed ones too, `acked`, the last version that was acknowledged, and `lost`, whether a
    server has come back older.
    """

    head: Head = Head()
    partition: Partition = Partition()
    flight: frozenset[Message] = frozenset()
    answers: frozenset[tuple[str, int, str]] = frozenset()
    open: frozenset[str] = frozenset({"A"})
    saved: tuple[Head | None, Partition | None, tuple[Entry, ...]] | None = None
    lineage: tuple[Entry, ...] = ()
    acked: int = 0
    lost: bool = False


class Writer(NamedTuple):
    """A process: one thread commits up to a version, another writes rows behind.

    `at` and `flush_at` are their next steps. `end`, `cells` and `known` are what it knows of the log's end, the rows
    and the partition's stamp, `sent` the stamp of its last write, `seen` how many times the head had started when it
    last looked; `entry` is what it appends, `watched` the owner's key as it watches it; `breaks` is how many times its
    connection may break.
    """

    name: str
    last: int
    at: str = "idle"
    breaks: int = 0
    end: int = 0
    cells: Cells = ((), ())
    known: Stamp = (0, 0)
    entry: Entry | None = None
    watched: Watched | None = None
    life: int = 0
    flush_at: str = "rest"
    flushed: int = 0
    cell: int = 0
    sent: Stamp = (0, 0)
    seen: int = 1
    workers: bool = False
    gradient: str = ""
    newest: str = "0"
    job: int = 1


class Worker(NamedTuple):
    """A worker of a job: whose, and of which of its jobs, and the version and commit that it has read last."""

    joined: tuple[str, int] = ("A", 1)
    read: tuple[int, str] | None = None


class World(NamedTuple):
    """The servers and all processes. `loses`: which servers may once come back older, 0 the head, 1 the partition."""

    store: Store
    writers: tuple[Writer, ...]
    loses: tuple[int, ...] = ()
    worker: Worker | None = None


_TOUCHED = {1: (0,), 2: (1,), 3: (0, 1)}


def entry_of(version: int, commit: str, parts: int, cells: Cells, based_on: str = "") -> Entry:
    """The commit that makes a version of these rows."""
    images = tuple((cell, (*cells[cell], commit)) for cell in _TOUCHED[version])
    return Entry(version, commit, parts, images, based_on)


def applied(cells: Cells, entries: tuple[Entry, ...]) -> Cells:
    for entry in entries:
        for cell, row in entry.images:
            cells = (row, cells[1]) if cell == 0 else (cells[0], row)
    return cells


def whole_entries(head: Head) -> tuple[Entry, ...] | None:
    """The entries of the log; None: one is missing, or not whole."""
    entries: list[Entry] = []
    begun: Entry | None = None
    expected = (head.stream[0][0], 0) if head.stream else (1, 0)
    for sequence, part, entry in head.stream:
        if (sequence, part) != expected or entry.sequence != sequence or (part and entry != begun):
            return None
        begun = entry
        expected = (sequence, part + 1)
        if part + 1 == entry.parts:
            entries.append(entry)
            expected = (sequence + 1, 0)
    return tuple(entries) if not expected[1] else None


def recovered(store: Store, without: str = "") -> tuple[int, Cells] | None:
    """What a process finds that opens the store now: version and rows; None: it says that something is lost."""
    entries, head, partition = whole_entries(store.head), store.head, store.partition
    if entries is None:
        return None
    first, last = (entries[0].sequence, entries[-1].sequence) if entries else (1, 0)
    if last < head.flushed or first > head.flushed + 1:
        return None
    if partition.stamp[0] > last and without != "stamps of rows":
        return None
    if partition.stamp < head.stamp and without != "stamps of the state":
        return None
    return last, applied(partition.cells, tuple(entry for entry in entries if entry.sequence > head.flushed))


def with_cell(partition: Partition, message: Message) -> Partition:
    cells = (message.row, partition.cells[1]) if message.cell == 0 else (partition.cells[0], message.row)
    return partition._replace(cells=cells, stamp=message.stamp)
