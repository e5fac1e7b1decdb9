"""ConvE (Dettmers et al., 2018): a convolution over head and relation, by TensorFlow."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import Side
from elastable.replicas.knowledge_graphs.scores.function import ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels.dot import Dot

__all__ = ["ConvE"]

_FILTERS, _KERNEL = 32, 3
_SMALLEST_VARIANCE = 1e-5


class ConvE(ScoreFunction):
    """`relu(W relu(conv([h; r])) + b) . t + bias of t`; an entity is `[e, bias]`.

    Head and relation are laid as images of `height x (dim / height)`, one above
    the other. Both hidden layers are scaled and shifted by the mean and
    variance of their own activations of that query (layer normalisation, where
    the paper has batch normalisation): so a query does not depend on the
    others of its batch, on how many workers share it, or on training and
    answering. Asks for tails only, as in the paper: train it with reciprocal
    relations.

    Args:
        dim: Of an entity, without its bias.
        norm: Not used.

    Raises:
        BadInput: `dim` makes no image of height and width of at least 2.
    """

    name = "ConvE"
    sides: tuple[Side, ...] = ("tail",)

    def __init__(self, dim: int, norm: int = 2) -> None:
        self._height = next((h for h in (10, 8, 4, 2) if dim % h == 0 and dim // h >= 2), 0)
        if not self._height:
            raise BadInput(f"ConvE of dim {dim}: dim must be even and at least 4, to be laid as an image")
        self.dim = self.relation_width = self.query_width = dim
        self.entity_width = dim + 1
        self.comparison = Dot(bias=True)
        self.entities = self.relations = InitializerSpec("normal", 0.0, 0.05)
        self.dense = MappingProxyType(self._initial(dim))
        self._steps: Any = None

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        self.require_side(side)
        forward, _ = self._compiled()
        return np.asarray(forward(given[:, :-1], relation, *self.dense.values()))

    def query_gradients(
        self, given: Float32, relation: Float32, side: Side, gradients: Float32
    ) -> tuple[Float32, Float32]:
        """As in `ScoreFunction.query_gradients`; those of the variables are dropped, see `all_gradients`."""
        to_given, to_relation, _ = self.all_gradients(given, relation, side, gradients)
        return to_given, to_relation

    def all_gradients(
        self, given: Float32, relation: Float32, side: Side, gradients: Float32
    ) -> tuple[Float32, Float32, dict[str, Float32]]:
        _, backward = self._compiled()
        found = [np.asarray(value) for value in backward(given[:, :-1], relation, gradients, *self.dense.values())]
        to_given = np.concatenate([found[0], np.zeros((len(given), 1), np.float32)], axis=1)
        return to_given, found[1], dict(zip(self.dense, found[2:], strict=True))

    def _initial(self, dim: int) -> dict[str, Float32]:
        rows, columns = 2 * self._height, dim // self._height
        flat = rows * columns * _FILTERS  # padded at its edges, so that small images work
        draw = np.random.Generator(np.random.Philox(dim))
        return {
            "filters": _scaled(draw, (_KERNEL, _KERNEL, 1, _FILTERS), _KERNEL * _KERNEL),
            "filters_bias": np.zeros(_FILTERS, np.float32),
            "hidden": _scaled(draw, (flat, dim), flat),
            "hidden_bias": np.zeros(dim, np.float32),
        }

    def _compiled(self) -> Any:
        if self._steps is None:
            self._steps = _compile(self._height)
        return self._steps


def _scaled(draw: np.random.Generator, shape: tuple[int, ...], inputs: int) -> Float32:
    values: Float32 = (draw.standard_normal(shape) * np.sqrt(2 / inputs)).astype(np.float32)
    return values


def _compile(height: int) -> Any:
    import tensorflow as tf

    def normalised(x: Any, axes: list[int]) -> Any:
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + _SMALLEST_VARIANCE)

    def forward(given: Any, relation: Any, filters: Any, filters_bias: Any, hidden: Any, hidden_bias: Any) -> Any:
        count = tf.shape(given)[0]
        image = tf.reshape(tf.concat([given, relation], axis=1), [count, 2 * height, -1, 1])
        maps = tf.nn.conv2d(image, filters, 1, "SAME") + filters_bias
        maps = tf.nn.relu(normalised(maps, [1, 2, 3]))
        flat = tf.reshape(maps, [count, tf.shape(hidden)[0]])
        return tf.nn.relu(normalised(tf.matmul(flat, hidden) + hidden_bias, [1]))

    def backward(given: Any, relation: Any, gradients: Any, *dense: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([given, relation, *dense])
            total = tf.reduce_sum(forward(given, relation, *dense) * gradients)
        return tape.gradient(total, [given, relation, *dense])

    return tf.function(forward, reduce_retracing=True), tf.function(backward, reduce_retracing=True)
