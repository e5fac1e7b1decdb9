"""Servers of `tests.consistency.protocol`: they execute what reaches them, and one may come back older."""

from collections.abc import Iterator

from tests.consistency.world import Head, Message, Store, with_cell


def execute(store: Store, without: str) -> Iterator[Store]:
    """The stores after one of the requests on their way was executed, or got lost with its connection."""
    for message in store.flight:
        rest = store._replace(flight=store.flight - {message})
        if message.entry is not None:
            yield _append(rest, message, without)
        elif message.writer in store.open:
            yield _write(rest, message, without)
        else:
            yield rest  # its connection was closed before


def _append(store: Store, message: Message, without: str) -> Store:
    head, entry = store.head, message.entry
    assert entry is not None
    if head.watched != message.watched and without != "watch":
        return _answered(store, message, "nil")
    added = tuple(
        (entry.sequence, part, entry)
        for part in range(entry.parts)
        if not head.stream or (entry.sequence, part) > head.stream[-1][:2]
    )
    store = store._replace(head=head._replace(stream=(*head.stream, *added)))
    if len(added) < entry.parts:
        return _answered(store, message, "error")
    store = store._replace(lineage=(*store.lineage[: entry.sequence - 1], entry))
    return _answered(store, message, "done")


def _write(store: Store, message: Message, without: str) -> Store:
    if store.partition.stamp not in message.known and without != "stamps at writing":
        return _answered(store, message, "stamp")
    return _answered(store._replace(partition=with_cell(store.partition, message)), message, "written")


def _answered(store: Store, message: Message, answer: str) -> Store:
    return store._replace(answers=store.answers | {(message.writer, message.life, answer)})


def cut(store: Store, after: int) -> Store:
    stream = tuple(part for part in store.head.stream if part[0] <= after)
    return store._replace(head=store.head._replace(stream=stream), lineage=store.lineage[:after])


def trimmed(head: Head, through: int) -> Head:
    """Entries before `through` are gone."""
    return head._replace(stream=tuple(part for part in head.stream if part[0] >= through))


def lose(store: Store, servers: tuple[int, ...]) -> Iterator[Store]:
    """Servers keep what they have, and come back with it later: all their connections end, and requests with them."""
    if not servers or store.lost:
        return
    if store.saved is None:
        head, partition = (store.head if 0 in servers else None), (store.partition if 1 in servers else None)
        yield store._replace(saved=(head, partition, store.lineage))
        return
    head, partition, saved = store.saved
    flight = {m for m in store.flight if (partition if m.entry is None else head) is None}
    lineage = store.lineage if head is None else saved
    yield store._replace(
        head=store.head if head is None else head._replace(starts=head.starts + 1),
        partition=store.partition if partition is None else partition,
        flight=frozenset(flight),
        open=store.open if partition is None else frozenset(),
        lineage=lineage,
        acked=min(store.acked, len(lineage)),
        lost=True,
    )
