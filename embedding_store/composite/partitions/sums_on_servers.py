"""What store servers measure of the gradients that they sum: asked of all of them, and put together."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Sequence
from functools import partial

from elastable.embedding_store.composite.coordinator.store_calls import StoreCalls
from elastable.embedding_store.composite.partitions.server_watch import ServerWatch
from elastable.embedding_store.shards.row_pushes import Measured, RowSums
from elastable.embedding_store.shards.shard_store import ShardServer, ShardStore

__all__ = ["SumsOnServers", "union_of"]


class SumsOnServers(ShardStore, ABC):
    """What a `ShardedStore` asks of its servers between the pushes of a version and its commit."""

    _servers: tuple[ShardServer, ...]
    _calls: StoreCalls
    watch: ServerWatch

    def measure(self, sums: RowSums) -> Measured:
        found = self._calls.run(
            {n: self.watch.timed(n, partial(server.measure, sums)) for n, server in enumerate(self._servers)}
        )
        return _measured_together(list(found.values()))


def _measured_together(every: Sequence[Measured]) -> Measured:
    """What all servers measured."""
    if missing := union_of(measured.missing for measured in every):
        return Measured(missing=missing)
    broken = {table for measured in every for table in measured.not_finite}
    squares: dict[str, int] = {}
    for measured in every:
        for table, square in measured.squares.items():
            if table not in broken:
                squares[table] = squares.get(table, 0) + square
    return Measured(squares, tuple(sorted(broken)))


def union_of(every: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """All of them, each once, in order."""
    return tuple(sorted({number for numbers in every for number in numbers}))
