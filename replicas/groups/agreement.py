"""Replicas that go on together or fail together: what they are is compared, and one's error is everyone's."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from elastable.embedding_store.errors import BadInput, ElastableError, StoreFailed
from elastable.replicas.groups.group import ReplicaGroup

__all__ = ["raise_together", "require_same"]


def require_same(group: ReplicaGroup, what: str, described: Mapping[str, object]) -> None:
    """Called by every member; returns once all have described the same.

    Args:
        group: The replicas.
        what: Is described; begins the error.
        described: Name -> value, of whatever JSON has.

    Raises:
        BadInput: names the first difference, and whose it is; on every member.
    """
    said = json.dumps(described, sort_keys=True).encode()
    heard = [json.loads(text.tobytes()) for text in group.all_gather_uneven(np.frombuffer(said, np.uint8))]
    for rank, other in enumerate(heard):
        for name in sorted({*heard[0], *other}):
            first, theirs = heard[0].get(name), other.get(name)
            if first != theirs:
                raise BadInput(
                    f"{what}: replicas differ in {name}: rank {group.ranks[0]} has {first!r}, "
                    f"rank {group.ranks[rank]} has {theirs!r}"
                )


def raise_together(group: ReplicaGroup, error: ElastableError | None) -> None:
    """Called by every member, with its error or without; raises on all of them where one has an error.

    Raises:
        ElastableError: a member's own error; StoreFailed for others', with the rank and its message.
    """
    said = b"" if error is None else f"{type(error).__name__}: {error}".encode()
    heard = group.all_gather_uneven(np.frombuffer(said, np.uint8))
    if error is not None:
        raise error
    for rank, text in enumerate(heard):
        if len(text):
            raise StoreFailed(f"rank {group.ranks[rank]}: {text.tobytes().decode()}")
