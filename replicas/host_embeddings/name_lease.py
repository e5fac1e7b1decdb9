"""The exclusive lease of a host embedding's name: one registration at a time in each replica."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from elastable.embedding_store.errors import BadInput
from elastable.replicas.groups.group import ReplicaGroup

__all__ = ["release", "take"]

_lock = threading.Lock()
# Replicas may be threads of one process: the member of a group holds a name, not the process.
_held: WeakKeyDictionary[ReplicaGroup, set[str]] = WeakKeyDictionary()


def take(group: ReplicaGroup, name: str) -> None:
    """Raises BadInput if the name is taken already."""
    with _lock:
        names = _held.setdefault(group.outermost, set())
        if name in names:
            raise BadInput(
                f"host embedding {name!r} is registered already: a name has one registration at a time, which ends "
                "with its `with` block"
            )
        names.add(name)


def release(group: ReplicaGroup, name: str) -> None:
    with _lock:
        _held[group.outermost].discard(name)
