"""Work that rank 0 does for all replicas: what it says all hear, and where it fails all fail alike."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

import elastable.embedding_store.errors as errors
from elastable.embedding_store.errors import ElastableError
from elastable.replicas.groups.group import ReplicaGroup

__all__ = ["at_root"]


def at_root(group: ReplicaGroup, work: Callable[[], str]) -> str:
    """Runs `work` on rank 0; every replica calls this.

    Args:
        group: All replicas.
        work: Returns what the others are to know; not called by them.

    Returns:
        What it returned, on every replica.

    Raises:
        ElastableError: what it raised, of the same class and with the same message on every replica.
    """
    told, failure = {"said": ""}, None
    if group.rank == 0:
        try:
            told = {"said": work()}
        except ElastableError as error:
            told, failure = {"kind": type(error).__name__, "said": str(error)}, error
    text = np.frombuffer(json.dumps(told).encode() if group.rank == 0 else b"", np.uint8)
    heard: dict[str, str] = json.loads(group.all_gather_uneven(text)[0].tobytes())
    if failure is not None:
        raise failure
    if "kind" in heard:
        kind: type[ElastableError] = getattr(errors, heard["kind"], ElastableError)
        raise kind(heard["said"])
    return heard["said"]
