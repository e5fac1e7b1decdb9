"""One table of an `et.DistributedEmbedding`: looks up and combines the ids of its features."""

from __future__ import annotations

import keras
import tensorflow as tf

from elastable.embedding_store.errors import BadIds
from elastable.worker.keras.structures import TensorLike
from elastable.worker.layers.embedding import Embedding
from elastable.worker.rows.combine import flatten_ids, shape_rows
from elastable.worker.rows.id_values import as_int64, require_id_dtype, require_in_vocabulary

__all__ = ["TableFeatures"]


class TableFeatures(Embedding):
    """The rows of one table for features of any rank; created by `et.DistributedEmbedding`.

    Like `keras_rs.layers.EmbedReduce`: ids of rank 1 are looked up, ids of higher rank are also reduced over the last
    axis, in float32.
    """

    def call(
        self, inputs: TensorLike, weights: TensorLike | None = None, training: bool | None = None, length: int = 0
    ) -> tf.Tensor | tf.RaggedTensor:
        """The output of one feature.

        Args:
            inputs: Integer ids: dense of any rank, ragged or sparse of rank 2.
            weights: Weight of each id in its combination, of the same kind and shape; None: 1.
            training: As in Keras.
            length: If positive, return a sequence of this length instead of a combination.

        Raises:
            BadIds: a sequence with weights, or with ids whose rank is not 2.
        """
        if length:
            return self._sequence(inputs, weights, length, training)
        if inputs.shape.rank is not None and inputs.shape.rank < 2:
            return self._single(inputs, weights, training)
        return self.embed(inputs, weights, training)

    def output_spec(self, inputs: TensorLike, length: int) -> keras.KerasTensor:
        """Symbolic output of the symbolic ids of one feature."""
        kept = tuple(inputs.shape[:1]) if length else tuple(inputs.shape[:-1]) or tuple(inputs.shape)
        shape = (*kept, length, self.output_dim) if length else (*kept, self.output_dim)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def _single(self, ids: tf.Tensor, weights: TensorLike | None, training: bool | None) -> tf.Tensor:
        """The mean of one id is its row, whatever its weight; a sum applies the weight."""
        flat = flatten_ids(self.name, ids, None, None, False, self.input_dim, self._vocabulary_here())
        found = self._rows_of(flat.ids, training)
        self.add_penalty(flat.ids, found)
        rows = shape_rows(flat, found, None, self.output_dim)
        if weights is not None and self.combiner == "sum":
            rows *= tf.cast(tf.expand_dims(weights, -1), rows.dtype)
        return tf.cast(rows, self.compute_dtype)

    def _sequence(self, ids: TensorLike, weights: TensorLike | None, length: int, training: bool | None) -> tf.Tensor:
        if weights is not None or ids.shape.rank != 2:
            message = "weights" if weights is not None else f"ids of rank {ids.shape.rank}"
            raise BadIds(
                f"table {self.name!r}: a sequence (max_sequence_length={length}) takes ids of rank 2 and no weights, "
                f"got {message}"
            )
        sparse = _positions(ids, length)
        require_id_dtype(self.name, ids.dtype.name, self.input_dim)
        flat, vocabulary = as_int64(self.name, sparse.values, sparse), self._vocabulary_here()
        if vocabulary is not None:
            flat = require_in_vocabulary(self.name, flat, sparse, vocabulary)
        rows = self._rows_of(flat, training)
        self.add_penalty(flat, rows)
        shape = tf.stack([sparse.dense_shape[0], tf.constant(length, tf.int64), self.output_dim])
        placed = tf.scatter_nd(sparse.indices, rows, shape)
        placed.set_shape([ids.shape[0], length, self.output_dim])
        return tf.cast(placed, self.compute_dtype)


def _positions(ids: TensorLike, length: int) -> tf.SparseTensor:
    """The first `length` ids of each row as a sparse tensor `[batch, n]`."""
    if isinstance(ids, tf.RaggedTensor):
        sparse = ids.to_sparse()
    elif isinstance(ids, tf.SparseTensor):
        sparse = ids
    else:
        shape = tf.shape(ids, tf.int64)
        rows, columns = tf.meshgrid(tf.range(shape[0]), tf.range(shape[1]), indexing="ij")
        indices = tf.stack([tf.reshape(rows, [-1]), tf.reshape(columns, [-1])], axis=1)
        sparse = tf.SparseTensor(indices, tf.reshape(ids, [-1]), shape)
    return tf.sparse.retain(sparse, sparse.indices[:, 1] < length)
