"""Processes of `tests.consistency.protocol`: they take over, recover, commit, and write rows behind."""

from collections.abc import Iterator

from tests.consistency.servers import cut, trimmed
from tests.consistency.world import Broken, Entry, Message, Stamp, Store, Writer, applied, entry_of, recovered

Step = tuple[Store, Writer]


def commit(store: Store, me: Writer, without: str) -> Iterator[Step]:
    """What the next step of the thread that commits makes of the servers and of its process."""
    if me.at in ("take over", "kill", "open"):
        yield _take_over(store, me, without)
    elif me.at == "idle":
        if me.end == me.last:
            yield store, me._replace(at="done")
        elif me.gradient or not me.workers:
            entry = entry_of(me.end + 1, f"{me.end + 1}{me.name}", 2, me.cells, me.gradient)
            yield store, me._replace(at="connect", entry=entry, gradient="")
    elif me.at == "connect":
        yield _connect(store, me, without)
    elif me.at == "send":
        yield _send(store, me, without)
    elif me.at == "wait":
        yield from _wait(store, me)
    elif me.at == "settle":
        yield _settle(store, me, without)
    elif me.at == "look":
        yield from _look(store, me, without)


def _take_over(store: Store, me: Writer, without: str) -> Step:
    if me.at == "take over":
        head = store.head._replace(owner=(me.name, store.head.owner[1] + 1))
        return store._replace(head=head), me._replace(at="kill")
    if me.at == "kill":
        return store if without == "kill" else store._replace(open=store.open & {me.name}), me._replace(at="open")
    if store.head.owner[0] != me.name:
        return store, me._replace(at="taken over")
    found = recovered(store, without)
    if found is None:
        return store, _ended(store, me, "it refuses to open")
    version, cells = found
    # Rows of the log are written anew: nobody knows which of them are in the tier.
    stamp = store.partition.stamp
    me = me._replace(seen=store.head.starts, known=stamp, sent=stamp)
    newest = store.lineage[version - 1].commit if version else "0"
    return store, me._replace(at="idle", end=version, cells=cells, flushed=-1, newest=newest)


def _ended(store: Store, me: Writer, why: str) -> Writer:
    """A process that can go on no more, which is right only where something was lost."""
    if not store.lost:
        raise Broken(f"process {me.name} ended, and nothing was lost: {why}")
    return me._replace(at="refused", entry=None)


def _last(store: Store) -> int:
    return store.head.stream[-1][0] if store.head.stream else 0


def _connect(store: Store, me: Writer, without: str) -> Step:
    if me.watched is not None:
        return store, me._replace(at="send")
    if store.head.owner[0] != me.name and without != "owner check":
        return store, me._replace(at="taken over")
    if _last(store) != me.end and without != "end of the log":
        return store, _ended(store, me, f"the log ends with {_last(store)}, and {me.end} was appended")
    return store, me._replace(at="send", watched=store.head.watched)


def _send(store: Store, me: Writer, without: str) -> Step:
    assert me.watched is not None
    message = Message(me.name, me.life, watched=me.watched, entry=me.entry)
    assert me.entry is not None
    if without == "log before rows":
        me = me._replace(cells=applied(me.cells, (me.entry,)))
    return store._replace(flight=store.flight | {message}), me._replace(at="wait")


def _wait(store: Store, me: Writer) -> Iterator[Step]:
    assert me.entry is not None
    for answer in store.answers:
        if answer[:2] != (me.name, me.life) or answer[2] in ("written", "stamp"):
            continue
        rest = store._replace(answers=store.answers - {answer})
        if answer[2] == "done":
            yield rest._replace(acked=min(me.entry.sequence, len(rest.lineage))), _appended(me)
        elif answer[2] == "nil":
            yield rest, me._replace(at="connect", watched=None, life=me.life + 1)
        else:
            yield rest, _ended(store, me, "its entry is in the log in part")
    broke = me._replace(at="settle", watched=None, life=me.life + 1)
    waiting = [m for m in store.flight if m.writer == me.name and m.entry is not None and m.life == me.life]
    answered = any(answer[:2] == (me.name, me.life) for answer in store.answers)
    if not waiting and not answered:
        yield store, broke  # the server came back older
    elif me.breaks:
        store = store._replace(answers=frozenset(a for a in store.answers if a[:2] != (me.name, me.life)))
        yield store, broke._replace(breaks=me.breaks - 1)
        if waiting:
            yield store._replace(flight=store.flight - set(waiting)), broke._replace(breaks=me.breaks - 1)


def _appended(me: Writer) -> Writer:
    assert me.entry is not None
    cells, newest = applied(me.cells, (me.entry,)), me.entry.commit
    return me._replace(at="idle", end=me.entry.sequence, cells=cells, entry=None, newest=newest)


def _settle(store: Store, me: Writer, without: str) -> Step:
    """What is still on its way fails by its WATCH."""
    if without == "settle":
        return store, me._replace(at="look")
    if store.head.owner[0] != me.name:
        return store, me._replace(at="taken over")
    head = store.head._replace(owner=(me.name, store.head.owner[1] + 1))
    return store._replace(head=head), me._replace(at="look")


def _look(store: Store, me: Writer, without: str) -> Iterator[Step]:
    """The entry in doubt is there or not; then it is appended again, or another one is."""
    if store.head.owner[0] != me.name:
        yield store, me._replace(at="taken over")
        return
    assert me.entry is not None
    other = Entry(me.entry.sequence, me.entry.commit + "'", 1, _renamed(me.entry), me.entry.based_on)
    # Another attempt is another job's: the workers of this one have to join again.
    anew = me if without == "a job's only attempt" else me._replace(job=me.job + 1, gradient="")
    if store.head.stream and store.head.stream[-1][2] == me.entry and without != "look":
        yield store._replace(acked=me.entry.sequence), _appended(me)
        yield cut(store, me.end), anew._replace(at="connect", entry=other)
    else:
        yield store, me._replace(at="connect")
        yield store, anew._replace(at="connect", entry=other)


def _renamed(entry: Entry) -> tuple[tuple[int, tuple[str, ...]], ...]:
    return tuple((cell, (*row[:-1], row[-1] + "'")) for cell, row in entry.images)


def flush(store: Store, me: Writer, without: str) -> Iterator[Step]:
    """Likewise, of the thread that writes rows behind."""
    if me.at in ("take over", "kill", "open", "taken over", "refused") or me.workers:
        return
    order = ["cells", "put", "trim"]
    if without == "rows before state":
        order = ["put", "trim", "cells"]
    if without == "state before trim":
        order = ["trim", "cells", "put"]
    following = dict(zip(["note", *order], [*order, "rest"], strict=True))
    if me.flush_at == "rest":
        if me.flushed < me.end:
            yield store, me._replace(flush_at=following["note"], flushed=me.end, cell=0)
    elif me.flush_at == "cells":
        yield from _write_cell(store, me, following["cells"], without)
    elif me.flush_at == "check":
        taken = store.head.owner[0] != me.name and without != "owner check"
        yield store, me._replace(at="taken over") if taken else me._replace(flush_at="cells")
    elif me.flush_at == "written":
        yield from _hear(store, me)
    elif store.head.owner[0] != me.name and without != "owner check":
        yield store, me._replace(at="taken over")
    elif me.flush_at == "put":
        head = store.head._replace(flushed=me.flushed, stamp=me.known)
        yield store._replace(head=head), me._replace(flush_at=following["put"])
    elif store.head.starts != me.seen and without != "server of the state":
        yield store, me._replace(flush_at=following["trim"], seen=store.head.starts)
    else:
        yield store._replace(head=trimmed(store.head, me.flushed)), me._replace(flush_at=following["trim"])


def _write_cell(store: Store, me: Writer, following: str, without: str) -> Iterator[Step]:
    if me.cell == 2:
        yield store, me._replace(flush_at=following)
    elif me.name not in store.open:
        yield store._replace(open=store.open | {me.name}), me._replace(flush_at="check")
    else:
        row, known = me.cells[me.cell], (me.known, me.sent)
        message = Message(me.name, 0, cell=me.cell, row=row, stamp=_stamp(me, without), known=known)
        yield store._replace(flight=store.flight | {message}), me._replace(flush_at="written", sent=message.stamp)


def _stamp(me: Writer, without: str) -> Stamp:
    """Greater than every stamp that this process knows of."""
    greatest = max(me.known, me.sent)
    if me.end > greatest[0] or without == "stamps that grow":
        return (me.end, 0)
    return (greatest[0], greatest[1] + 1)


def _hear(store: Store, me: Writer) -> Iterator[Step]:
    for answer in store.answers:
        if answer[0] == me.name and answer[2] in ("written", "stamp"):
            rest = store._replace(answers=store.answers - {answer})
            if answer[2] == "stamp":
                yield rest, _ended(store, me, "the partition is not as it was left")
            else:
                yield rest, me._replace(flush_at="cells", cell=me.cell + 1, known=me.sent)
            return
    if not any(m.writer == me.name and m.entry is None for m in store.flight):
        yield store, me._replace(flush_at="cells")  # the connection broke: the row is written once more
