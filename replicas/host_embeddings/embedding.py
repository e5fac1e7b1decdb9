"""`create_host_embedding` and `HostEmbedding`: a host table as a Keras layer whose lookups pass gradients on.

After `embedding_ops.create_host_embedding` of TensorFlow for the IPU: the
sparse gradient is exchanged and applied by the embedding's own optimizer in
the moment in which a tape computes it. What a tape needs for that is a
variable on the way; it is a scalar weight of the layer, whose gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.native.range_pool import available_cores
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import ThreadGroup
from elastable.replicas.host_embeddings.create import Initial, create_host_table
from elastable.replicas.host_embeddings.exchange.gathered_ids import GatheredIds, require_integers
from elastable.replicas.host_embeddings.host_table import HostTable
from elastable.replicas.host_embeddings.optimizer_spec import HostEmbeddingOptimizerSpec
from elastable.replicas.host_embeddings.state import State
from elastable.worker.rows.initializers import initializer_spec, seed_of

__all__ = ["HostEmbedding", "create_host_embedding"]


def create_host_embedding(
    name: str,
    shape: Sequence[int],
    dtype: Any = np.float32,
    partition_strategy: str = "TOKEN",
    optimizer_spec: HostEmbeddingOptimizerSpec | None = None,
    initializer: Initial | keras.initializers.Initializer = None,
    *,
    group: ReplicaGroup | None = None,
    store: EmbeddingStore | None = None,
    enable_remote_buffer_embedding: bool | None = None,
    reduction: str = "mean",
    token_exchange: str = "rows",
    seed: int = 0,
    threads: int | None = None,
) -> HostEmbedding:
    """As `elastable.replicas.host_embeddings.create.create_host_table`, for Keras and TensorFlow.

    Args:
        initializer: A Keras initializer, too.
        name, shape, dtype, partition_strategy, optimizer_spec, group, store: As there.
        enable_remote_buffer_embedding, reduction, token_exchange, seed, threads: As there.

    Raises:
        BadSpec, BadInput, SpecConflict: as there.
        Unsupported: an initializer that cannot be computed row by row.
    """
    if isinstance(initializer, keras.initializers.Initializer):
        seed = seed_of(initializer, seed)
        initializer = initializer_spec(name, initializer, int(shape[0]), int(shape[1]))
    table = create_host_table(
        name, shape, dtype, partition_strategy, optimizer_spec, initializer,
        group=group, store=store, enable_remote_buffer_embedding=enable_remote_buffer_embedding,
        reduction=reduction, token_exchange=token_exchange, seed=seed, threads=threads,
    )  # fmt: skip
    return HostEmbedding(table)


class HostEmbedding(keras.layers.Layer):  # type: ignore[misc]
    """A table in the replicas' own memory, or a store's, as a Keras layer.

    Used as a layer, or by `lookup`: in functional and subclassed models, under
    `fit` and `tf.function`, and in loops with a tape. Every lookup is a
    collective of all replicas, and so is its gradient: all of them run the
    same model, equally many batches of it, evaluation included.

    Each lookup's gradient is one step of the optimizer. Where a model looks
    the table up k times in a step, `accumulation_factor=k` sums them first.

    Attributes:
        table: What it looks up in.
    """

    def __init__(self, table: HostTable) -> None:
        """See `create_host_embedding`."""
        super().__init__(name=table.spec.name.replace("/", "_"), dtype="float32")
        self.table = table
        self.supports_jit = False  # XLA compiles no calls to Python
        self._anchor = self.add_weight(
            shape=(), initializer="zeros", name="on_the_way", trainable=table.optimizer is not None
        )
        self.built = True

    @contextmanager
    def register(self) -> Iterator[Self]:
        """As `HostTable.register`; lookups run within, models may be built and compiled before."""
        with self.table.register():
            yield self

    def lookup(self, indices: Any, clip_indices: bool = True) -> Any:
        """Rows of indices.

        Args:
            indices: Integers of any shape: a tensor, an array or lists, or a Keras tensor in a functional model.
            clip_indices: Whether indices outside the table become the nearest inside.

        Returns:
            A tensor of the table's dtype, the indices' shape + `[columns]`.

        Raises:
            BadIds: indices that are no integers.
            BadInput: it is not registered.
            IdOutOfRange: without clipping, an index outside; named.
            Within compiled functions TensorFlow raises these as errors of its own, with their name and message.
        """
        if any(isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten(indices)):
            return self(indices, clip_indices=clip_indices)
        return self.call(indices, clip_indices)

    def call(self, inputs: Any, clip_indices: bool = True) -> Any:
        """As `lookup`."""
        indices = tf.convert_to_tensor(inputs)
        require_integers(self.table.spec.name, indices.dtype.name, indices.dtype.is_integer)
        anchor = tf.convert_to_tensor(self._anchor)
        if not (self.trainable and self.table.optimizer):
            anchor = tf.stop_gradient(anchor)  # so that no tape asks for what would be a step
        rows = self._differentiable(clip_indices)(indices, anchor)
        return tf.cast(rows, self.table.spec.dtype)

    def compute_output_spec(self, inputs: Any, clip_indices: bool = True) -> keras.KerasTensor:
        """Shape and dtype of `call`'s result, for functional models."""
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        require_integers(self.table.spec.name, dtype, "int" in dtype)
        return keras.KerasTensor((*inputs.shape, self.table.spec.dim), self.table.spec.dtype)

    def get_embedding_tensor(self) -> npt.NDArray[Any]:
        """`[rows, columns]` of the table's dtype: the table as it stands, modified or not; every replica calls it."""
        return self.table.whole()

    def state(self) -> State:
        """As `HostTable.state`."""
        return self.table.state()

    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """As `HostTable.restore`."""
        self.table.restore(state)

    def get_config(self) -> dict[str, Any]:
        """Refused: a table that replicas hold cannot be written into a model's file."""
        raise Unsupported(
            f"host embedding {self.table.spec.name!r} is no part of a saved model: its rows lie with the replicas. "
            "Save its state(), and the model's weights (save_weights)"
        )

    def _differentiable(self, clip_indices: bool) -> Callable[..., Any]:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def rows_of(indices: Any, anchor: Any) -> Any:
            rows, ids, counts = self._forward(indices, clip_indices)

            def gradient(upstream: Any) -> tuple[None, Any]:
                return None, self._backward(ids, counts, tf.convert_to_tensor(upstream), anchor)

            return rows, gradient

        return rows_of  # type: ignore[no-any-return]

    def _forward(self, indices: Any, clip_indices: bool) -> tuple[Any, Any, Any]:
        """The rows, and what `_backward` needs: everyone's ids `[total]`, counts and samples `[2, replicas]`."""

        def look_up(given: npt.NDArray[Any]) -> tuple[Float32, Int64, Int64]:
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

    def _backward(self, ids: Any, counts: Any, upstream: Any, anchor: Any) -> Any:
        """Exchanges and applies the gradient; returns the anchor's, zero, which is known once that is done."""

        def update(ids: Int64, counts: Int64, gradients: Float32) -> Float32:
            self.table.update(GatheredIds(ids, counts[0], counts[1]), gradients)
            return np.float32(0)  # type: ignore[return-value]

        if tf.executing_eagerly():
            return tf.constant(update(np.asarray(ids), np.asarray(counts), upstream.numpy()))
        zero = tf.numpy_function(update, [ids, counts, upstream], tf.float32)
        zero.set_shape(anchor.shape)
        return zero

    def _require_threads(self) -> None:
        """Compiled functions wait for other replicas on TensorFlow's threads, which replicas in one process share."""
        group = self.table.group
        threads = tf.config.threading.get_inter_op_parallelism_threads() or available_cores()
        if isinstance(group, ThreadGroup) and threads < group.size:
            raise Unsupported(
                f"host embedding {self.table.spec.name!r}: {group.size} replicas in threads of one process wait for "
                f"each other within compiled functions, and TensorFlow has {threads} threads for that; call "
                f"tf.config.threading.set_inter_op_parallelism_threads({group.size}) before its first operation, or "
                "run eagerly"
            )
