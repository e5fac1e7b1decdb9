"""ConvE (Dettmers et al., 2018): a convolution over head and relation, in TensorFlow."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import Side
from elastable.replicas.knowledge_graphs.scores.functions import QueryGradients, ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels.dot_products import Dot

if TYPE_CHECKING:
    import tensorflow as tf

Compiled = Callable[..., Sequence["tf.Tensor"]]

_FILTERS, _KERNEL = 32, 3
_SMALLEST_VARIANCE = 1e-5


class ConvE(ScoreFunction):
    """`relu(W relu(conv([h; r])) + b) . t + bias of t`; an entity is `[e, bias]`.

    Head and relation are reshaped to images of `height x (dim / height)`, one above the other. Both hidden layers use
    layer normalisation, where the paper has batch normalisation: so a query depends neither on the others of its batch,
    nor on the number of workers, nor on whether it is trained. Like the paper, it answers tail queries only: train it
    with reciprocal relations.

    Args:
        dim: Size of an entity, without its bias.

    Raises:
        BadInput: `dim` is not that of an image with height and width of at least 2.
    """

    name = "ConvE"
    sides: tuple[Side, ...] = ("tail",)

    def __init__(self, dim: int, seed: int = 0) -> None:
        self._height = next((h for h in (10, 8, 4, 2) if dim % h == 0 and dim // h >= 2), 0)
        if not self._height:
            raise BadInput(f"ConvE of dim {dim}: dim must be even and at least 4, to be laid as an image")
        self.dim = self.relation_width = self.query_width = dim
        self.entity_width = dim + 1
        self.comparison = Dot(bias=True)
        self.entities = self.relations = InitializerSpec("normal", 0.0, 0.05)
        self.dense = MappingProxyType(self._initial(dim, seed))
        self._steps: tuple[Callable[..., tf.Tensor], Compiled] | None = None

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        self.require_side(side)
        forward, _ = self._compiled()
        dense = [value.astype(given.dtype, copy=False) for value in self.dense.values()]  # also in double precision
        return np.asarray(forward(given[:, :-1], relation, *dense))

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        _, backward = self._compiled()
        found = [np.asarray(value) for value in backward(given[:, :-1], relation, gradients, *self.dense.values())]
        to_given = np.concatenate([found[0], np.zeros((len(given), 1), np.float32)], axis=1)
        return to_given, found[1], dict(zip(self.dense, found[2:], strict=True))

    def _initial(self, dim: int, seed: int) -> dict[str, Float32]:
        rows, columns = 2 * self._height, dim // self._height
        flat = rows * columns * _FILTERS  # the convolution pads, so that small images work
        draw = np.random.Generator(np.random.Philox([dim, seed & (2**64 - 1)]))
        return {
            "filters": _scaled(draw, (_KERNEL, _KERNEL, 1, _FILTERS), _KERNEL * _KERNEL),
            "filters_bias": np.zeros(_FILTERS, np.float32),
            "hidden": _scaled(draw, (flat, dim), flat),
            "hidden_bias": np.zeros(dim, np.float32),
        }

    def _compiled(self) -> "tuple[Callable[..., tf.Tensor], Compiled]":
        if self._steps is None:
            self._steps = _compile(self._height)
        return self._steps


def _scaled(draw: np.random.Generator, shape: tuple[int, ...], inputs: int) -> Float32:
    values: Float32 = (draw.standard_normal(shape) * np.sqrt(2 / inputs)).astype(np.float32)
    return values


def _compile(height: int) -> "tuple[Callable[..., tf.Tensor], Compiled]":
    import tensorflow as tf

    def normalised(x: tf.Tensor, axes: list[int]) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + _SMALLEST_VARIANCE)

    def forward(given: tf.Tensor, relation: tf.Tensor, *dense: tf.Tensor) -> tf.Tensor:
        filters, filters_bias, hidden, hidden_bias = dense
        count = tf.shape(given)[0]
        image = tf.reshape(tf.concat([given, relation], axis=1), [count, 2 * height, -1, 1])
        maps = tf.nn.conv2d(image, filters, 1, "SAME") + filters_bias
        maps = tf.nn.relu(normalised(maps, [1, 2, 3]))
        flat = tf.reshape(maps, [count, tf.shape(hidden)[0]])
        return tf.nn.relu(normalised(tf.matmul(flat, hidden) + hidden_bias, [1]))

    def backward(given: tf.Tensor, relation: tf.Tensor, gradients: tf.Tensor, *dense: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([given, relation, *dense])
            total = tf.reduce_sum(forward(given, relation, *dense) * gradients)
        found: list[tf.Tensor] = tape.gradient(total, [given, relation, *dense])
        return found

    forwards = tf.function(forward, autograph=False, reduce_retracing=True)
    return forwards, tf.function(backward, autograph=False, reduce_retracing=True)
