"""Writers of `tests.consistency.protocol`: they take over, recover, and commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.consistency.world import Broken, Image, Part, Rows, Store, Writer, applied, restored, touched, with_part

__all__ = ["write"]


def write(store: Store, me: Writer, without: str) -> Iterator[tuple[Store, Writer]]:
    """What a writer's next step makes of the servers and of itself."""
    if me.at in ("done", "refused"):
        return
    if me.at.startswith("take over"):
        yield _take_over(store, me, without)
    elif me.at in ("name", "check"):
        yield _connect(store, me, without)
    elif me.at in _WRITES and (me.name, _server(me)) not in store.open:
        yield store, replace(me, at="name", then=me.at)  # its connection was closed: it opens a new one
    elif me.at == "declare":
        yield _declare(store, me, without)
    elif me.at in ("stamps", "undo", "undo rest"):
        yield _recover(store, me, without)
    else:
        yield _commit(store, me, without)


_WRITES = ("write", "write rest", "undo", "undo rest", "declare", "publish", "record")


def _anew(me: Writer, at: str = "read") -> Writer:
    """Nothing is known any more of what was read: so there are fewer states."""
    return Writer(me.name, me.last, at)


def _server(me: Writer) -> int:
    return 0 if me.at in ("declare", "publish", "record") else me.part


def _take_over(store: Store, me: Writer, without: str) -> tuple[Store, Writer]:
    order = (0, 1, None) if without == "owner before kill" else (None, 0, 1)
    turn = int(me.at[-1])
    server = order[turn]
    if server is None:
        store = replace(store, owner=f"{me.name}0")
    elif without != "kill":
        store = replace(store, open=frozenset((who, at) for who, at in store.open if at != server))
    if turn < 2:
        return store, replace(me, at=f"take over {turn + 1}")
    return store, replace(me, at="name", then="read" if without == "recovery" else "stamps")


def _connect(store: Store, me: Writer, without: str) -> tuple[Store, Writer]:
    if me.at == "name":
        return replace(store, open=store.open | {(me.name, 0), (me.name, 1)}), replace(me, at="check")
    if store.owner[0] == me.name or without == "owner check":
        return store, replace(me, at=me.then)
    return store, _anew(me, "refused")


def _recover(store: Store, me: Writer, without: str) -> tuple[Store, Writer]:
    if me.at == "stamps":
        stamps = (store.parts[0].stamp, store.parts[1].stamp)
        return store, _next_undo(replace(me, version=store.version, stamps=stamps, part=-1))
    part = store.parts[me.part]
    if me.at == "undo rest":
        store = with_part(store, me.part, Part(me.rows[0], me.version, part.images))
        return store, _next_undo(me)
    images = {version: (rows, stamp) for version, rows, stamp in part.images}
    if me.stamps[me.part] not in images:
        raise Broken(f"partition {me.part} bears {me.stamps[me.part]}, and there is no before-image of it")
    found, stamp = images[me.stamps[me.part]]
    rows = restored(part.rows, found)
    left = tuple(image for image in part.images if image[0] != me.stamps[me.part])
    if without == "whole undo":
        dropped = with_part(store, me.part, replace(part, images=left))
        return dropped, replace(me, at="undo rest", rows=(rows, me.rows[1]))
    store = with_part(store, me.part, Part(rows, part.stamp if without == "stamp restored" else stamp, left))
    return store, _next_undo(me)


def _next_undo(me: Writer) -> Writer:
    """Goes on with the next partition beyond the version; after the last one it lets that be known."""
    beyond = [number for number in range(2) if number > me.part and me.stamps[number] > me.version]
    return replace(me, at="undo", part=beyond[0]) if beyond else replace(me, at="declare")


def _declare(store: Store, me: Writer, without: str) -> tuple[Store, Writer]:
    """Everything is taken back: all must be well now."""
    if store.owner[0] == me.name:
        rows = (store.parts[0].rows, store.parts[1].rows)
        if rows != store.truth[store.version]:
            raise Broken(f"after the recovery version {store.version} is {rows}")
        if store.record != store.version or max(part.stamp for part in store.parts) > store.version:
            raise Broken(f"after the recovery version {store.version} has record {store.record}, and {store.parts}")
    owner = store.owner if without == "end of recovery" else f"{me.name}1"
    return replace(store, owner=owner), _anew(me)


def _commit(store: Store, me: Writer, without: str) -> tuple[Store, Writer]:
    version = me.version + 1
    if me.at == "read":
        if store.owner[0] != me.name and without != "owner check":
            return store, _anew(me, "refused")
        if store.version >= me.last:
            return store, _anew(me, "done")
        read = (store.parts[0].rows, store.parts[1].rows)
        stamps = (store.parts[0].stamp, store.parts[1].stamp)
        following = "publish" if without == "partitions first" else "write"
        return store, replace(
            me, at=following, part=min(touched(store.version + 1, me.name)), version=store.version, rows=read,
            stamps=stamps, oldest=99 if store.pin < 0 else store.pin,
        )  # fmt: skip
    if me.at == "write":
        return _write_part(store, me, without)
    if me.at == "write rest":
        part, number = store.parts[me.part], me.part
        images = _images(part, me, version, without)
        return with_part(store, number, replace(part, stamp=version, images=images)), _next_write(me, without)
    if me.at == "record":
        return replace(store, record=version, acked=version), _anew(me)
    record = store.record if without == "record with version" else version
    published = replace(store, version=version, record=record, truth=(*store.truth, _made(store, me)))
    if without == "partitions first":
        return published, replace(me, at="write", part=min(touched(version, me.name)))
    if without == "record with version":
        return published, replace(me, at="record")
    return replace(published, acked=version), _anew(me)


def _made(store: Store, me: Writer) -> tuple[Rows, Rows]:
    """What a commit makes of the version before it, which must be what it read."""
    if store.version != me.version or me.rows != store.truth[me.version]:
        raise Broken(f"version {me.version + 1} was made of {me.rows}, and {store.truth[me.version]} stood")
    first, second = (
        applied(rows, touched(me.version + 1, me.name).get(number, ()), f"{me.version + 1}{me.name}")
        for number, rows in enumerate(me.rows)
    )
    return first, second


def _write_part(store: Store, me: Writer, without: str) -> tuple[Store, Writer]:
    version, number = me.version + 1, me.part
    part = store.parts[number]
    rows = applied(me.rows[number], touched(version, me.name)[number], f"{version}{me.name}")
    if without == "one transaction":
        return with_part(store, number, replace(part, rows=rows)), replace(me, at="write rest")
    stamp = part.stamp if without == "stamps written" else version
    images = () if without == "before-images" else _images(part, me, version, without)
    return with_part(store, number, Part(rows, stamp, images)), _next_write(me, without)


def _images(part: Part, me: Writer, version: int, without: str) -> tuple[Image, ...]:
    """Before-images after a write: the new one, and those that a pin needs."""
    kept = part.images if me.stamps[me.part] > me.oldest and without != "images for pins" else ()
    old = tuple(image for image in kept if image[0] != version)
    changed = tuple((number, me.rows[me.part][number]) for number in touched(version, me.name)[me.part])
    return (*old, (version, changed, me.stamps[me.part]))


def _next_write(me: Writer, without: str) -> Writer:
    left = [number for number in touched(me.version + 1, me.name) if number > me.part]
    if left:
        return replace(me, at="write", part=left[0])
    return _anew(me) if without == "partitions first" else replace(me, at="publish")
