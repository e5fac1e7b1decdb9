"""Creates a host embedding's table: agreed on by all replicas, and laid out."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.replicas.groups.agreement import require_same
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.host_embeddings.exchange.callbacks import Callbacks
from elastable.replicas.host_embeddings.exchange.remote_buffers import EncodingBuffers, TokenBuffers, TokenSums
from elastable.replicas.host_embeddings.exchange.row_exchange import RowExchange
from elastable.replicas.host_embeddings.host_table import HostTable
from elastable.replicas.host_embeddings.options import HostTableOptions
from elastable.replicas.processes.world import replica_group

__all__ = ["create_host_table"]


def create_host_table(
    options: HostTableOptions,
    *,
    group: ReplicaGroup | None = None,
    store: EmbeddingStore | None = None,
    enable_remote_buffer_embedding: bool | None = None,
    threads: int | None = None,
) -> HostTable:
    """Creates a table that all members of a group look up and train; every member calls it with the same options.

    `create_host_embedding` documents the arguments and errors.
    """
    group = _own_group() if group is None else group
    spec, rows = options.spec, options.rows
    callbacks = _uses_callbacks(options.name, group, store, enable_remote_buffer_embedding)
    require_same(group, f"host embedding {options.name!r}", {**options.described(), "callbacks": callbacks})
    strategy = options.strategy(group.size)
    exchange: RowExchange
    if callbacks:
        exchange = Callbacks(group, spec, store)
    else:
        tokens = TokenBuffers if options.token_exchange == "rows" else TokenSums
        exchange = (tokens if strategy == "TOKEN" else EncodingBuffers)(group, spec, threads)
    if rows is not None:
        slots = row_optimizer(spec.optimizer).initial_slots(spec.dim)
        exchange.replace(RowBlock(np.arange(len(rows)), rows, np.tile(slots, (len(rows), 1))))
    return HostTable(spec, options.optimizer_spec, exchange, strategy, options.reduction)


@lru_cache(maxsize=1)
def _own_group() -> ReplicaGroup:
    """The group of all processes that MPI started, or of this one alone; the same at every call."""
    return replica_group()


def _uses_callbacks(name: str, group: ReplicaGroup, store: EmbeddingStore | None, remote_buffers: bool | None) -> bool:
    option = f"host embedding {name!r}: enable_remote_buffer_embedding={remote_buffers}"
    if remote_buffers and store is not None:
        raise BadSpec(f"{option}: rows are in the replicas' own memory then; leave store out, or give False")
    if remote_buffers is False and store is None and group.size > 1:
        raise BadSpec(
            f"{option}: callbacks need a store that all {group.size} replicas reach, such as "
            "store=et.open_store('grpc://HOST:PORT') of an `elastable serve`, or redis://"
        )
    return store is not None if remote_buffers is None else not remote_buffers
