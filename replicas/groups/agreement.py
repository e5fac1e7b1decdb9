"""Replicas that succeed or fail together: settings are compared, and an error on one is raised on all."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

import elastable.embedding_store.errors as errors
from elastable.embedding_store.errors import BadInput, ElastableError, StoreFailed
from elastable.replicas.groups.group import ReplicaGroup


def require_same(group: ReplicaGroup, what: str, described: Mapping[str, object]) -> None:
    """Compares a description across replicas; every member calls it.

    Args:
        what: What is described; begins the error message.
        described: Name -> JSON value.

    Raises:
        BadInput: on every member; names the first difference and the rank that differs.
    """
    heard = [json.loads(text) for text in _exchanged(group, json.dumps(described, sort_keys=True))]
    for rank, other in enumerate(heard):
        for name in sorted({*heard[0], *other}):
            first, theirs = heard[0].get(name), other.get(name)
            if first != theirs:
                raise BadInput(
                    f"{what}: replicas differ in {name}: rank {group.ranks[0]} has {first!r}, "
                    f"rank {group.ranks[rank]} has {theirs!r}"
                )


@contextmanager
def fail_together(group: ReplicaGroup) -> Iterator[None]:
    """Every member enters it; an ElastableError that a member's block raises is raised on all of them.

    The block must not call collectives: a member that failed no longer takes part in them.

    Raises:
        ElastableError: this member's own error, or StoreFailed with another's rank and message.
    """
    if group.size == 1:
        yield
        return
    error: ElastableError | None = None
    try:
        yield
    except ElastableError as failure:
        error = failure
    heard = _exchanged(group, "" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(heard):
        if text:
            raise StoreFailed(f"rank {group.ranks[rank]}: {text}")


def run_at_root(group: ReplicaGroup, work: Callable[[], str]) -> str:
    """Runs `work` on rank 0 alone; every member calls this and gets what it returned.

    Raises:
        ElastableError: what `work` raised, with the same class and message on every member.
    """
    message, failure = {"result": ""}, None
    if group.rank == 0:
        try:
            message = {"result": work()}
        except ElastableError as error:
            message, failure = {"kind": type(error).__name__, "result": str(error)}, error
    heard: dict[str, str] = json.loads(_exchanged(group, json.dumps(message) if group.rank == 0 else "")[0])
    if failure is not None:
        raise failure
    if "kind" in heard:
        kind: type[ElastableError] = getattr(errors, heard["kind"], ElastableError)
        raise kind(heard["result"])
    return heard["result"]


def _exchanged(group: ReplicaGroup, text: str) -> list[str]:
    return [found.tobytes().decode() for found in group.all_gather_uneven(np.frombuffer(text.encode(), np.uint8))]
