"""Gradients that store servers sum, and the dense variables that they keep: asked of all of them, and put together."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from elastable.embedding_store.composite.coordinator.store_calls import StoreCalls
from elastable.embedding_store.composite.partitions.server_watch import ServerWatch
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.shards.row_pushes import DenseLayout, Measured, RowSums
from elastable.embedding_store.shards.shard_store import ShardServer, ShardStore
from elastable.embedding_store.shards.sums.dense_slices import cut, joined, layout_of_servers

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

    def sum_dense(self, sums: RowSums, dense: DenseLayout, squares: bool) -> Measured:
        of_servers = layout_of_servers(dense, len(self._servers))
        found = self._calls.run(
            {
                n: self.watch.timed(n, partial(server.sum_dense, sums, of_servers[n], squares))
                for n, server in enumerate(self._servers)
            }
        )
        together = _measured_together(list(found.values()))
        if together.missing:
            return together
        return replace(together, dense=joined([found[n].dense for n in range(len(self._servers))], dense))

    def keep_dense(self, version: int, values: Mapping[int, Array], dense: DenseLayout) -> None:
        of_servers, shares = layout_of_servers(dense, len(self._servers)), cut(values, dense, len(self._servers))
        self._calls.run(
            {n: partial(server.keep_dense, version, shares[n], of_servers[n]) for n, server in enumerate(self._servers)}
        )

    def read_dense(self, job: str, version: int, dense: DenseLayout) -> dict[int, Array]:
        of_servers = layout_of_servers(dense, len(self._servers))
        found = self._calls.run(
            {n: partial(server.read_dense, job, version, of_servers[n]) for n, server in enumerate(self._servers)}
        )
        return joined([found[n] for n in range(len(self._servers))], dense)


def _measured_together(every: Sequence[Measured]) -> Measured:
    """What all servers measured, but for dense gradients."""
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
