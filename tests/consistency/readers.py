"""Readers of `tests.consistency.protocol`: of the current version, and of a pinned one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.consistency.world import Broken, Pinner, Reader, Store, restored

__all__ = ["read", "read_pinned"]


def read(store: Store, me: Reader, without: str) -> Iterator[tuple[Store, Reader]]:
    """As `write`, of a lookup of the current version."""
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


def read_pinned(store: Store, me: Pinner, without: str) -> Iterator[tuple[Store, Pinner]]:
    """Like `write`, for a reader that pins a version and reads it later."""
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
            rows = restored(rows, image)
        if rows != store.truth[me.version][number]:
            raise Broken(f"partition {number} of pinned version {me.version} was read as {rows}")
