"""The servers and the processes of `tests.consistency.protocol`, as values that can be compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = [
    "Broken",
    "Image",
    "Part",
    "Pinner",
    "Reader",
    "Rows",
    "Store",
    "World",
    "Writer",
    "applied",
    "restored",
    "touched",
    "with_part",
]


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


def with_part(store: Store, number: int, part: Part) -> Store:
    """The servers with another partition of that number."""
    parts = (part, store.parts[1]) if number == 0 else (store.parts[0], part)
    return replace(store, parts=parts)


def restored(rows: Rows, image: tuple[tuple[int, Row], ...]) -> Rows:
    """Rows after those of a before-image were put back."""
    first, second = (dict(image).get(number, row) for number, row in enumerate(rows))
    return first, second
