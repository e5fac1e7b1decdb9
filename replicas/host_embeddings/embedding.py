"""`create_host_embedding` and `HostEmbedding`: a host table as a Keras layer with gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NoReturn, Self

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array, Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.native.range_pool import available_cores
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.replicas.groups.agreement import require_same
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import ThreadGroup
from elastable.replicas.host_embeddings.exchanges import (
    Callbacks,
    EncodingBuffers,
    GatheredIds,
    RowExchange,
    TokenBuffers,
    TokenSums,
    require_integers,
)
from elastable.replicas.host_embeddings.host_table import HostTable, State
from elastable.replicas.host_embeddings.optimizer_spec import HostEmbeddingOptimizerSpec
from elastable.replicas.host_embeddings.options import HostTableOptions, InitialRows
from elastable.replicas.processes.world import replica_group
from elastable.worker.rows.initializers import initializer_spec, seed_of


def create_host_embedding(
    name: str,
    shape: Sequence[int],
    dtype: object = np.float32,
    partition_strategy: str = "TOKEN",
    optimizer_spec: HostEmbeddingOptimizerSpec | None = None,
    initializer: InitialRows | keras.initializers.Initializer = None,
    *,
    group: ReplicaGroup | None = None,
    store: EmbeddingStore | None = None,
    enable_remote_buffer_embedding: bool | None = None,
    reduction: str = "mean",
    token_exchange: str = "rows",
    seed: int = 0,
    threads: int | None = None,
) -> "HostEmbedding":
    """Creates an embedding that all members of a group look up and train; every member calls it with the same options.

    Args:
        name: Name of the table.
        shape: Rows and columns.
        dtype: float32, float16 or bfloat16, as NumPy or TensorFlow name them.
        partition_strategy: "TOKEN", "ENCODING", or "AUTO" (chosen by the cost model).
        optimizer_spec: How to train it; None: not at all.
        initializer: A Keras initializer, the name of a kind of `InitializerSpec`, such a spec, or the
            rows `[rows, columns]`. None: uniform from -0.05 to 0.05, as Keras' Embedding.
        group: The replicas. None: all processes that MPI started, or this one alone.
        store: Keeps the rows; they are exchanged by callbacks. None: the replicas' own memory.
        enable_remote_buffer_embedding: Named as the option of an `IPUConfig`. True: remote buffers, in the
            replicas' own memory. False: callbacks, to `store` (one replica alone may leave it out and gets
            a memory store). None: callbacks if `store` is given, else remote buffers.
        reduction: Of the replicas' gradients. "mean": weighted by their batches, so that mean losses of
            the parts become the mean loss of the whole batch. "sum".
        token_exchange: How rows split by token are exchanged. "rows": each replica sends the rows that it
            has. "sums": a reduce-scatter of rows and zeros; n times as many bytes, the same bits.
        seed: Seed of the initial values.
        threads: Threads per replica for large lookups and updates; None: one per core. Does not affect results.

    Raises:
        BadSpec: an invalid option, or one that does not fit `store`.
        BadInput: replicas give different options; names the first difference.
        SpecConflict: the store has another table of that name.
        Unsupported: the initializer cannot be computed row by row.
    """
    if isinstance(initializer, keras.initializers.Initializer):
        seed = seed_of(initializer, seed)
        initializer = initializer_spec(name, initializer, int(shape[0]), int(shape[1]))
    options = HostTableOptions(
        name, shape, dtype, partition_strategy, optimizer_spec, initializer, reduction, token_exchange, seed
    )
    remote = enable_remote_buffer_embedding
    return HostEmbedding(
        create_host_table(options, group=group, store=store, enable_remote_buffer_embedding=remote, threads=threads)
    )


class HostEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """A table in the replicas' own memory, or a store's, as a Keras layer.

    Call it as a layer or use `lookup`: in functional and subclassed models, under `fit` and `tf.function`, and in loops
    with a tape. Every lookup is a collective of all replicas, and so is its gradient: all replicas run the same model
    on the same number of batches, evaluation included.

    Each lookup's gradient is one step of the optimizer. If a model looks the table up k times in a step,
    `accumulation_factor=k` sums them first. `create_host_embedding` makes one.

    Attributes:
        takes_ids: Models with such a layer look at what their integer inputs are given.
    """

    takes_ids = True

    def __init__(self, table: HostTable) -> None:
        super().__init__(name=table.spec.name.replace("/", "_"), dtype="float32")
        self.table = table
        self.supports_jit = False  # XLA compiles no calls to Python
        # A tape computes gradients of variables only: lookups depend on this scalar, whose gradient is zero.
        self._anchor = self.add_weight(
            shape=(), initializer="zeros", name="on_the_way", trainable=table.optimizer is not None
        )
        self.built = True

    @contextmanager
    def register(self) -> Iterator[Self]:
        """`HostTable.register`, around all lookups; models may be built and compiled before."""
        with self.table.register():
            yield self

    def lookup(self, indices: tf.Tensor, clip_indices: bool = True) -> tf.Tensor:
        """The rows of indices.

        Args:
            indices: Integers of any shape: a tensor, an array, lists, or a Keras tensor in a functional model.
            clip_indices: Whether to clip indices to the table.

        Returns:
            A tensor of the table's dtype, the indices' shape + `[columns]`.

        Raises:
            BadIds: the indices are not integers.
            BadInput: the embedding is not registered.
            IdOutOfRange: an index is outside the table and `clip_indices` is False.
            In compiled functions TensorFlow raises its own errors, with these names and messages.
        """
        if any(isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten(indices)):
            return self(indices, clip_indices=clip_indices)
        return self.call(indices, clip_indices)

    def call(self, inputs: tf.Tensor, clip_indices: bool = True) -> tf.Tensor:
        """The rows of indices; see `lookup`."""
        indices = tf.convert_to_tensor(inputs)
        require_integers(self.table.spec.name, indices.dtype.name, indices.dtype.is_integer)
        anchor = tf.convert_to_tensor(self._anchor)
        if not (self.trainable and self.table.optimizer):
            anchor = tf.stop_gradient(anchor)  # computing its gradient would be a training step
        rows = self._differentiable(clip_indices)(indices, anchor)
        return tf.cast(rows, self.table.spec.dtype)

    def compute_output_spec(self, inputs: keras.KerasTensor, clip_indices: bool = True) -> keras.KerasTensor:
        """Shape and dtype of `call`'s result, for functional models."""
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        require_integers(self.table.spec.name, dtype, "int" in dtype)
        return keras.KerasTensor((*inputs.shape, self.table.spec.dim), self.table.spec.dtype)

    def get_embedding_tensor(self) -> Array:
        """`[rows, columns]` of the table's dtype: the current table; every replica calls it."""
        return self.table.whole()

    def state(self) -> State:
        """`HostTable.state`."""
        return self.table.state()

    def restore(self, state: State) -> None:
        """`HostTable.restore`."""
        self.table.restore(state)

    def get_config(self) -> NoReturn:
        """Raises Unsupported: a model file cannot hold a table of the replicas."""
        raise Unsupported(
            f"host embedding {self.table.spec.name!r} cannot be saved in a model file: the replicas hold its rows. "
            "Save its state() and the model's weights (save_weights)"
        )

    def _differentiable(self, clip_indices: bool) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def rows_of(indices: tf.Tensor, anchor: tf.Tensor) -> tf.Tensor:
            rows, ids, counts = self._forward(indices, clip_indices)

            def gradient(upstream: tf.Tensor) -> tuple[None, tf.Tensor]:
                return None, self._backward(ids, counts, tf.convert_to_tensor(upstream), anchor)

            return rows, gradient

        return rows_of  # type: ignore[no-any-return]

    def _forward(self, indices: tf.Tensor, clip_indices: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The rows; and for `_backward` everyone's ids `[total]`, counts and samples `[2, replicas]`."""

        def look_up(given: Array) -> tuple[Float32, Int64, Int64]:
            rows, batch = self.table.lookup_with_ids(given, clip_indices)
            return rows, batch.ids, np.stack([batch.counts, batch.samples])

        if tf.executing_eagerly():
            rows, ids, counts = look_up(indices.numpy())
            return tf.constant(rows), ids, counts
        self._require_threads()
        rows, ids, counts = tf.numpy_function(look_up, [indices], [tf.float32, tf.int64, tf.int64])
        rows.set_shape(indices.shape.concatenate([self.table.spec.dim]))
        ids.set_shape([None])
        counts.set_shape([2, self.table.group.size])
        return rows, ids, counts

    def _backward(self, ids: tf.Tensor, counts: tf.Tensor, upstream: tf.Tensor, anchor: tf.Tensor) -> tf.Tensor:
        """Exchanges and applies the gradient, then returns the anchor's, which is zero."""

        def update(ids: Int64, counts: Int64, gradients: Float32) -> Float32:
            self.table.update(GatheredIds(ids, counts[0], counts[1]), gradients)
            return np.float32(0)  # type: ignore[return-value]

        if tf.executing_eagerly():
            return tf.constant(update(np.asarray(ids), np.asarray(counts), upstream.numpy()))
        zero = tf.numpy_function(update, [ids, counts, upstream], tf.float32)
        zero.set_shape(anchor.shape)
        return zero

    def _require_threads(self) -> None:
        """In compiled functions, replicas in one process wait for each other on shared TensorFlow threads."""
        group = self.table.group
        threads = tf.config.threading.get_inter_op_parallelism_threads() or available_cores()
        if isinstance(group, ThreadGroup) and threads < group.size:
            raise Unsupported(
                f"host embedding {self.table.spec.name!r}: {group.size} replicas in threads of one process wait for "
                f"each other within compiled functions, and TensorFlow has {threads} threads for that; call "
                f"tf.config.threading.set_inter_op_parallelism_threads({group.size}) before its first operation, or "
                "run eagerly"
            )


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
