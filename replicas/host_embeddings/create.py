"""Making a host embedding's table: what is asked for is checked, agreed upon by all replicas, and laid out."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.replicas.groups.agreement import require_same
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.host_embeddings.exchange.callbacks import Callbacks
from elastable.replicas.host_embeddings.exchange.cost import choose_strategy
from elastable.replicas.host_embeddings.exchange.remote_buffers import EncodingBuffers, TokenBuffers, TokenSums
from elastable.replicas.host_embeddings.exchange.row_exchange import RowExchange
from elastable.replicas.host_embeddings.host_table import REDUCTIONS, HostTable
from elastable.replicas.host_embeddings.optimizer_spec import HostEmbeddingOptimizerSpec
from elastable.replicas.processes.world import replica_group

__all__ = ["DTYPES", "STRATEGIES", "TOKEN_EXCHANGES", "create_host_table", "own_group"]

STRATEGIES = ("TOKEN", "ENCODING", "AUTO")
TOKEN_EXCHANGES = ("rows", "sums")
DTYPES = ("float32", "float16", "bfloat16")

Initial = str | InitializerSpec | npt.NDArray[Any] | None


@lru_cache(maxsize=1)
def own_group() -> ReplicaGroup:
    """The group of all processes that MPI started with this one, or of this one alone; the same at every call."""
    return replica_group()


def create_host_table(
    name: str,
    shape: Sequence[int],
    dtype: Any = np.float32,
    partition_strategy: str = "TOKEN",
    optimizer_spec: HostEmbeddingOptimizerSpec | None = None,
    initializer: Initial = None,
    *,
    group: ReplicaGroup | None = None,
    store: EmbeddingStore | None = None,
    enable_remote_buffer_embedding: bool | None = None,
    reduction: str = "mean",
    token_exchange: str = "rows",
    seed: int = 0,
    threads: int | None = None,
) -> HostTable:
    """Makes a table that all members of a group look up and train; every member calls it alike.

    Args:
        name: Of the embedding, as of a `TableSpec`.
        shape: Rows and columns.
        dtype: Of the weights: float32, float16 or bfloat16, as NumPy or TensorFlow name them.
        partition_strategy: "TOKEN", "ENCODING", or "AUTO", which takes what the cost model says.
        optimizer_spec: How it is trained; None: it is not.
        initializer: A kind of `InitializerSpec` by name, such a spec, or the rows themselves, `[rows, columns]`;
            None: uniform from -0.05 to 0.05, as Keras' Embedding.
        group: The replicas; None: all processes that MPI started with this one, or this one alone.
        store: Where the rows lie: exchanged by callbacks. None: in the replicas' own memory.
        enable_remote_buffer_embedding: Which way rows and gradients go, by the name of the option of an `IPUConfig`
            that decides it there. True: remote buffers, in the replicas' own memory. False: callbacks, to `store`; one
            replica alone may leave that out, and has its rows in a memory store of its own. None: callbacks where
            `store` is given, else remote buffers.
        reduction: Of replicas' gradients. "mean": weighted by their batches, so that mean losses of the replicas'
            batches become the mean loss of the joined batch. "sum".
        token_exchange: How rows that are split by token change hands. "rows": each replica sends those that it has.
            "sums": as the document has it, by a reduce-scatter of rows and zeros; n times as many bytes, the same bits.
        seed: Of the initial values.
        threads: Of each replica, for large lookups and updates; None: one a core. Results do not depend on it.

    Raises:
        BadSpec: a name, shape, dtype, strategy, initializer or reduction that cannot be; a way that does not fit
            `store`.
        BadInput: replicas differ in what they ask for; names the first difference.
        SpecConflict: the store has another table of that name.
    """
    spec = _spec(name, shape, dtype, optimizer_spec, initializer, seed)
    group = own_group() if group is None else group
    _require_one_of("partition_strategy", name, partition_strategy, STRATEGIES)
    _require_one_of("reduction", name, reduction, REDUCTIONS)
    _require_one_of("token_exchange", name, token_exchange, TOKEN_EXCHANGES)
    callbacks = _by_callbacks(name, group, store, enable_remote_buffer_embedding)
    rows = _given_rows(spec, initializer)
    require_same(
        group,
        f"host embedding {name!r}",
        {
            "name": name,
            "shape": [int(length) for length in shape],
            "dtype": spec.dtype,
            "partition_strategy": partition_strategy,
            "initializer": asdict(spec.initializer) if rows is None else hashlib.blake2b(rows.data).hexdigest(),
            "seed": seed,
            "reduction": reduction,
            "token_exchange": token_exchange,
            "callbacks": callbacks,
            **({"optimizer": None} if optimizer_spec is None else optimizer_spec.described()),
        },
    )
    if partition_strategy == "AUTO":
        # An optimizer that looks across columns has its sums gathered once more where they are split.
        whole = row_optimizer(spec.optimizer).cross_column
        partition_strategy = "TOKEN" if whole else choose_strategy(int(shape[0]), int(shape[1]), group.size)
    exchange: RowExchange
    if callbacks:
        exchange = Callbacks(group, spec, store)
    else:
        tokens = TokenBuffers if token_exchange == "rows" else TokenSums
        buffers = tokens if partition_strategy == "TOKEN" else EncodingBuffers
        exchange = buffers(group, spec, threads)
    if rows is not None:
        slots = row_optimizer(spec.optimizer).initial_slots(spec.dim)
        exchange.replace(RowBlock(np.arange(len(rows)), rows, np.tile(slots, (len(rows), 1))))
    return HostTable(spec, optimizer_spec, exchange, partition_strategy, reduction)


def _by_callbacks(name: str, group: ReplicaGroup, store: EmbeddingStore | None, remote_buffers: bool | None) -> bool:
    """Whether rows and gradients go by callbacks to a store."""
    told = f"host embedding {name!r}: enable_remote_buffer_embedding={remote_buffers}"
    if remote_buffers and store is not None:
        raise BadSpec(f"{told}: rows lie in the replicas' own memory then; leave store out, or say False")
    if remote_buffers is False and store is None and group.size > 1:
        raise BadSpec(
            f"{told}: callbacks need a store that all {group.size} replicas reach, such as "
            "store=et.open_store('grpc://HOST:PORT') of an `elastable serve`, or redis://"
        )
    return store is not None if remote_buffers is None else not remote_buffers


def _spec(
    name: str,
    shape: Sequence[int],
    dtype: Any,
    optimizer_spec: HostEmbeddingOptimizerSpec | None,
    initializer: Initial,
    seed: int,
) -> TableSpec:
    lengths = tuple(shape) if isinstance(shape, (Sequence, np.ndarray)) and not isinstance(shape, str) else ()
    if len(lengths) != 2 or not all(isinstance(length, numbers.Integral) and length >= 1 for length in lengths):
        raise BadSpec(f"host embedding {name!r}: shape must be [rows, columns], two positive integers, got {shape!r}")
    if optimizer_spec is not None and not isinstance(optimizer_spec, HostEmbeddingOptimizerSpec):
        raise BadSpec(
            f"host embedding {name!r}: optimizer_spec must be a HostEmbeddingOptimizerSpec, or None for an embedding "
            f"that is not trained; got {type(optimizer_spec).__name__}"
        )
    return TableSpec(
        name=name,
        dim=int(lengths[1]),
        vocabulary_size=int(lengths[0]),
        dtype=_dtype(name, dtype),
        initializer=_initializer(name, initializer),
        seed=seed,
        optimizer=OptimizerSpec() if optimizer_spec is None else optimizer_spec.optimizer,
    )


def _dtype(name: str, dtype: Any) -> str:
    given = getattr(dtype, "name", None)  # of NumPy's dtypes and TensorFlow's
    if not isinstance(given, str):
        given = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", repr(dtype))
    if given not in DTYPES:
        raise BadSpec(f"host embedding {name!r}: dtype {given!r}; known dtypes are {', '.join(DTYPES)}")
    return given


def _initializer(name: str, initializer: Initial) -> InitializerSpec:
    if initializer is None:
        return InitializerSpec("random_uniform")
    if isinstance(initializer, InitializerSpec):
        return initializer
    if isinstance(initializer, str):
        return InitializerSpec(initializer)
    if isinstance(initializer, np.ndarray):
        return InitializerSpec("zeros")
    raise BadSpec(
        f"host embedding {name!r}: initializer must be the name of a kind, an InitializerSpec, or an array of the "
        f"rows; got {type(initializer).__name__}"
    )


def _given_rows(spec: TableSpec, initializer: Initial) -> Float32 | None:
    if not isinstance(initializer, np.ndarray):
        return None
    if initializer.shape != (spec.vocabulary_size, spec.dim) or initializer.dtype.kind not in "fiu":
        raise BadSpec(
            f"host embedding {spec.name!r}: the rows to begin with must be numbers [{spec.vocabulary_size}, {spec.dim}]"
            f", got {initializer.dtype} {list(initializer.shape)}"
        )
    return np.ascontiguousarray(initializer, np.float32)


def _require_one_of(what: str, name: str, given: object, known: Sequence[str]) -> None:
    if given not in known:
        raise BadSpec(f"host embedding {name!r}: {what} {given!r}; known are {', '.join(known)}")
