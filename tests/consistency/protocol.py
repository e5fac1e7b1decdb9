"""The protocol of versions in Redis (docs/consistency.md) as a program of atomic steps.

It is small enough to try every order. Two partitions of two rows each lie on
two servers, with the registry (version, record, owner, pin) on the first. Every
process may take its next step at any time, or never again: so a process that
dies, and one that is stopped and wakes up later, are among the orders that are
tried. A row is the list of commits that were applied to it, so one that is
lost, or applied twice, shows. Different writers make different commits of the
same version, as a job that goes on asynchronously does.

`WITHOUT` names ways to do it wrong, each leaving one precaution out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["WITHOUT", "Broken", "Part", "Pinner", "Reader", "Store", "World", "Writer", "steps", "touched"]

WITHOUT = {
    "before-images": "a commit leaves none",
    "partitions first": "the version is set before the partitions are written",
    "stamps read": "readers do not look at stamps",
    "stamps written": "a commit writes rows without their stamp",
    "one transaction": "a partition's rows are written first, its stamp and before-image after them",
    "record with version": "the record is written after the version",
    "kill": "who takes over does not close the connections of others",
    "owner check": "a new connection does not look who the owner is",
    "owner before kill": "who takes over closes connections first, and becomes the owner then",
    "recovery": "who takes over goes on without taking anything back",
    "whole undo": "a before-image is dropped first, the rows are restored after that",
    "stamp restored": "rows are restored, and their stamp is not",
    "images for pins": "a commit drops the before-images that a pin needs",
    "pin of the current": "a pin does not make sure that its version is still current",
    "owner again": "a reader of a pin does not make sure that nothing was taken back meanwhile",
    "end of recovery": "the owner's key does not change when everything has been taken back",
    "missing image": "a reader of a pin does not notice that a stamp has no before-image any more",
    "oldest image": "a reader of a pin takes the newest before-image",
}


class Broken(AssertionError):
    """A promise is broken in a state that can be reached."""


Row = tuple[str, ...]
"""The commits that were applied to it, such as "1A" and "2B"."""

Rows = tuple[Row, Row]
Image = tuple[int, tuple[tuple[int, Row], ...], int]
"""Version, (number, row) of those that it changed, and the old stamp."""


@dataclass(frozen=True, slots=True)
class Part:
    """A partition: its rows, its stamp, and before-images, oldest first."""

    rows: Rows = ((), ())
    stamp: int = 0
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Store:
    """What the servers hold.

    `open` are the named connections, (writer, server). Nobody in it knows
    `acked`, the last version that was acknowledged, and `truth`, the rows of
    every version that came to stand.
    """

    parts: tuple[Part, Part] = (Part(), Part())
    version: int = 0
    record: int = 0
    owner: str = "A1"
    pin: int = -1
    open: frozenset[tuple[str, int]] = frozenset({("A", 0), ("A", 1)})
    acked: int = 0
    truth: tuple[tuple[Rows, Rows], ...] = ((((), ()), ((), ())),)


@dataclass(frozen=True, slots=True)
class Writer:
    """A process that commits up to a version; one that does not own the store takes it over first.

    `at` is its next step, `part` of which partition; `version`, `stamps`, `rows`
    and `oldest` (the oldest pin) are what it read.
    """

    name: str
    last: int
    at: str = "read"
    part: int = 0
    version: int = 0
    stamps: tuple[int, int] = (0, 0)
    rows: tuple[Rows, Rows] = (((), ()), ((), ()))
    oldest: int = 99
    then: str = ""


@dataclass(frozen=True, slots=True)
class Reader:
    """Learns the version, then looks it up at both servers at once."""

    version: int = -1
    first: int = 0
    second: int = 0
    rows: tuple[Rows, Rows] = (((), ()), ((), ()))
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Pinner:
    """Pins the current version, and reads it later."""

    at: str = "look"
    version: int = -1
    owner: str = ""
    parts: tuple[Part, Part] = (Part(), Part())
    images: tuple[tuple[Image, ...], ...] = ((), ())
    done: int = 0
    tries: int = 1


@dataclass(frozen=True, slots=True)
class World:
    """The servers and all processes."""

    store: Store
    processes: tuple[Writer | Reader | Pinner, ...]


def touched(version: int, writer: str) -> dict[int, tuple[int, ...]]:
    """Of each partition that a writer's commit of a version changes, the numbers of its rows."""
    if version == 1:
        return {0: (0,), 1: (0,)} if writer == "A" else {0: (1,), 1: (0, 1)}
    return {1: (0, 1)} if version == 2 else {0: (0, 1), 1: (1,)}


def applied(rows: Rows, numbers: tuple[int, ...], commit: str) -> Rows:
    """Rows after a commit."""
    first, second = ((*row, commit) if number in numbers else row for number, row in enumerate(rows))
    return first, second


def steps(world: World, without: str) -> Iterator[World]:
    """All worlds that are one step of one process away.

    Raises:
        Broken: a process has seen what it must not.
    """
    for place, process in enumerate(world.processes):
        step = {Writer: _write, Reader: _read, Pinner: _read_pinned}[type(process)]
        for store, after in step(world.store, process, without):  # type: ignore[operator]
            _require_acknowledged(store)
            processes = (*world.processes[:place], after, *world.processes[place + 1 :])
            yield World(store, processes)


def _require_acknowledged(store: Store) -> None:
    if store.version < store.acked:
        raise Broken(f"version {store.acked} was acknowledged, and {store.version} stands")


def _with_part(store: Store, number: int, part: Part) -> Store:
    parts = (part, store.parts[1]) if number == 0 else (store.parts[0], part)
    return replace(store, parts=parts)


# -- writers


def _write(store: Store, me: Writer, without: str) -> Iterator[tuple[Store, Writer]]:
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
        store = _with_part(store, me.part, Part(me.rows[0], me.version, part.images))
        return store, _next_undo(me)
    images = {version: (rows, stamp) for version, rows, stamp in part.images}
    if me.stamps[me.part] not in images:
        raise Broken(f"partition {me.part} bears {me.stamps[me.part]}, and there is no before-image of it")
    found, stamp = images[me.stamps[me.part]]
    rows = _restored(part.rows, found)
    left = tuple(image for image in part.images if image[0] != me.stamps[me.part])
    if without == "whole undo":
        dropped = _with_part(store, me.part, replace(part, images=left))
        return dropped, replace(me, at="undo rest", rows=(rows, me.rows[1]))
    store = _with_part(store, me.part, Part(rows, part.stamp if without == "stamp restored" else stamp, left))
    return store, _next_undo(me)


def _restored(rows: Rows, image: tuple[tuple[int, Row], ...]) -> Rows:
    first, second = (dict(image).get(number, row) for number, row in enumerate(rows))
    return first, second


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
        return _with_part(store, number, replace(part, stamp=version, images=images)), _next_write(me, without)
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
        return _with_part(store, number, replace(part, rows=rows)), replace(me, at="write rest")
    stamp = part.stamp if without == "stamps written" else version
    images = () if without == "before-images" else _images(part, me, version, without)
    return _with_part(store, number, Part(rows, stamp, images)), _next_write(me, without)


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


# -- readers


def _read(store: Store, me: Reader, without: str) -> Iterator[tuple[Store, Reader]]:
    if me.version < 0:
        yield store, replace(me, version=store.version)
        return
    if me.refused or (me.first, me.second) == (2, 1):
        return
    if me.first == 0:
        yield store, replace(me, first=1, refused=store.version != me.version)
    elif me.first == 1:
        yield store, _looked(store, replace(me, first=2), 0, without)
    if me.second == 0:
        yield store, _looked(store, replace(me, second=1), 1, without)


def _looked(store: Store, me: Reader, number: int, without: str) -> Reader:
    part = store.parts[number]
    rows = (part.rows, me.rows[1]) if number == 0 else (me.rows[0], part.rows)
    me = replace(me, rows=rows, refused=me.refused or (part.stamp > me.version and without != "stamps read"))
    if (me.first, me.second) == (2, 1) and not me.refused and me.rows != store.truth[me.version]:
        raise Broken(f"version {me.version} was read as {me.rows}")
    return me


def _read_pinned(store: Store, me: Pinner, without: str) -> Iterator[tuple[Store, Pinner]]:
    if me.at == "look":
        yield store, replace(me, at="pin", version=store.version)
    elif me.at == "pin":
        if store.version != me.version and without != "pin of the current":
            yield store, replace(me, at="look")
        else:
            yield replace(store, pin=me.version), replace(me, at="owner")
    elif me.at == "owner":
        yield store, replace(me, at="rows", owner=store.owner, done=0)
    elif me.at in ("rows", "images"):
        for number in range(2):
            if not me.done >> number & 1:
                yield store, _took(store, me, number)
    elif me.at == "again":
        if store.owner != me.owner and without != "owner again":
            if me.tries:
                yield store, Pinner("owner", me.version, tries=me.tries - 1)
            return
        if _lacks_images(me) and without != "missing image":
            if me.tries:
                yield store, Pinner("owner", me.version, tries=me.tries - 1)
            return
        _require_pinned(store, me, without)
        yield store, Pinner("done")


def _took(store: Store, me: Pinner, number: int) -> Pinner:
    part, done = store.parts[number], me.done | 1 << number
    if me.at == "rows":
        me = replace(me, parts=(part, me.parts[1]) if number == 0 else (me.parts[0], part))
    else:
        me = replace(me, images=(part.images, me.images[1]) if number == 0 else (me.images[0], part.images))
    if done < 3:
        return replace(me, done=done)
    return replace(me, done=0, at="images" if me.at == "rows" else "again")


def _lacks_images(me: Pinner) -> bool:
    """Whether a stamp that was read has no before-image."""
    pairs = zip(me.parts, me.images, strict=True)
    return any(part.stamp > me.version and part.stamp not in {image[0] for image in images} for part, images in pairs)


def _require_pinned(store: Store, me: Pinner, without: str) -> None:
    for number in range(2):
        rows = me.parts[number].rows
        beyond = [image for image in me.images[number] if image[0] > me.version]
        # The oldest one that holds a row wins.
        for _, image, _ in beyond if without == "oldest image" else reversed(beyond):
            rows = _restored(rows, image)
        if rows != store.truth[me.version][number]:
            raise Broken(f"partition {number} of pinned version {me.version} was read as {rows}")
