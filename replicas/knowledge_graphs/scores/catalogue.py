"""Score functions by name, and what the columns of an entity's and of a relation's row are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import Side
from elastable.replicas.knowledge_graphs.scores.dot_products import Dot
from elastable.replicas.knowledge_graphs.scores.functions import (
    CP,
    BoxE,
    ComplEx,
    DistMult,
    InterHT,
    PairRE,
    QueryGradients,
    RotatE,
    ScoreFunction,
    TranS,
    TransE,
    TripleRE,
    TuckER,
)

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
        super().__init__(dim, Dot(), InitializerSpec("normal", 0.0, 0.05))
        self.entity_width = self.query_width = dim + 1
        self.dense = MappingProxyType(self._initial(dim, seed))

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        self.require_side(side)
        forward, _ = self._compiled
        dense = [value.astype(given.dtype, copy=False) for value in self.dense.values()]  # also in double precision
        hidden = np.asarray(forward(given[:, :-1], relation, *dense))
        return np.concatenate([hidden, np.ones((len(hidden), 1), hidden.dtype)], axis=1)  # times the candidate's bias

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        _, backward = self._compiled
        found = [
            np.asarray(value) for value in backward(given[:, :-1], relation, gradients[:, :-1], *self.dense.values())
        ]
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

    @cached_property
    def _compiled(self) -> "tuple[Callable[..., tf.Tensor], Compiled]":
        return _compile(self._height)


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


_DISTANCES = (TransE, RotatE, PairRE, TripleRE, BoxE, InterHT, TranS)
_PRODUCTS = (DistMult, ComplEx, ConvE, CP, TuckER)

SCORES: Mapping[str, type[ScoreFunction]] = MappingProxyType({maker.name: maker for maker in (*_DISTANCES, *_PRODUCTS)})
"""All score functions."""

_WITHOUT_NORM = {RotatE.name: "its distance is always the sum of the moduli of the complex differences"}
_PRODUCT = "its score is a product and not a distance"


def score_function(name: str, dim: int, norm: int | None = None, seed: int = 0) -> ScoreFunction:
    """A score function.

    Args:
        name: One of `SCORES`, in upper or lower case.
        dim: float32 values of an entity's embedding; of one part, if entities have two
            (BoxE, InterHT, TranS, CP), and without the bias (ConvE).
        norm: 1 or 2, for distances by a norm; None: the function's default.
        seed: Seed of further variables, where the function has any (ConvE, TuckER).

    Raises:
        BadInput: an unknown name, an invalid dim or norm, or a norm of a score that has none.
    """
    maker = {known.lower(): found for known, found in SCORES.items()}.get(name.lower())
    if maker is None:
        raise BadInput(f"score function {name!r}: known are {', '.join(SCORES)}")
    if dim < 1:
        raise BadInput(f"{maker.name} of dim {dim}: dim must be at least 1")
    chosen: dict[str, int] = {} if norm is None else {"norm": norm}
    if chosen and not maker.norms:
        raise BadInput(f"norm {norm} of {maker.name}: {_WITHOUT_NORM.get(maker.name, _PRODUCT)}; leave the norm out")
    if maker in (ConvE, TuckER):
        chosen["seed"] = seed
    return cast(Callable[..., ScoreFunction], maker)(dim, **chosen)


@dataclass(frozen=True, slots=True)
class RowPart:
    """Columns `first .. last - 1` of a row.

    Attributes:
        name: Name of the part.
        first, last: Its columns.
        meaning: How the score uses them, where that is not plain.
    """

    name: str
    first: int
    last: int
    meaning: str = ""


_UNIT = "divided by its length before it is used"
_ELU = "stored as x, used as elu(x) + 1"
_PLUS_ONE = "used with 1 added"

# Of each score: entity parts, relation parts; (name, meaning). All parts of a row are of one width, but a bias is 1.
_Parts = tuple[tuple[str, str], ...]
_COMPLEX: _Parts = (("real", ""), ("imaginary", ""))
_PLAIN: _Parts = (("embedding", ""),)
_LAYOUTS: dict[str, tuple[_Parts, _Parts]] = {
    "TransE": (_PLAIN, (("translation", ""),)),
    "RotatE": (_COMPLEX, (("phase", "an angle in radians: r = exp(i phase)"),)),
    "DistMult": (_PLAIN, (("diagonal", ""),)),
    "ComplEx": (_COMPLEX, _COMPLEX),
    "PairRE": ((("embedding", _UNIT),), (("head scale", ""), ("tail scale", ""))),
    "TripleRE": ((("embedding", _UNIT),), (("head scale", _PLUS_ONE), ("tail scale", _PLUS_ONE), ("translation", ""))),
    "InterHT": ((("embedding", _UNIT), ("aid", f"{_UNIT}, then 1 is added")), (("translation", ""),)),
    "TranS": (
        (("embedding", _UNIT), ("aid", f"{_UNIT}, then 1 is added")),
        (("head scale", ""), ("translation", ""), ("tail scale", "")),
    ),
    "BoxE": (
        (("point", ""), ("bump", "moves the point of the other end")),
        (("head middle", ""), ("head width", _ELU), ("tail middle", ""), ("tail width", _ELU)),
    ),
    "CP": ((("as head", ""), ("as tail", "")), (("diagonal", ""),)),
    "TuckER": (_PLAIN, _PLAIN),
    "ConvE": ((("embedding", ""), ("bias", "added to the score of an answer")), (("embedding", ""),)),
}


def row_layout(score: ScoreFunction) -> dict[str, tuple[RowPart, ...]]:
    """The parts of an "entity"'s and of a "relation"'s row, from the first column to the last."""
    entity, relation = _LAYOUTS[score.name]
    widths = score.entity_width, score.relation_width
    return {"entity": _parts(entity, widths[0]), "relation": _parts(relation, widths[1])}


def _parts(named: _Parts, width: int) -> tuple[RowPart, ...]:
    biases = sum(name == "bias" for name, _ in named)
    each, parts, first = (width - biases) // (len(named) - biases), [], 0
    for name, meaning in named:
        last = first + (1 if name == "bias" else each)
        parts.append(RowPart(name, first, last, meaning))
        first = last
    return tuple(parts)
