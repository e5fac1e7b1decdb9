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

from tests.consistency.readers import read, read_pinned
from tests.consistency.world import Broken, Pinner, Reader, Store, World, Writer
from tests.consistency.writers import write

__all__ = ["WITHOUT", "steps"]

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


def steps(world: World, without: str) -> Iterator[World]:
    """All worlds that are one step of one process away.

    Raises:
        Broken: a process has seen what it must not.
    """
    for place, process in enumerate(world.processes):
        step = {Writer: write, Reader: read, Pinner: read_pinned}[type(process)]
        for store, after in step(world.store, process, without):  # type: ignore[operator]
            _require_acknowledged(store)
            processes = (*world.processes[:place], after, *world.processes[place + 1 :])
            yield World(store, processes)


def _require_acknowledged(store: Store) -> None:
    if store.version < store.acked:
        raise Broken(f"version {store.acked} was acknowledged, and {store.version} stands")
