"""Score functions: how plausible a triple is, and how that changes with its embeddings."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import Side
from elastable.replicas.knowledge_graphs.scores.comparison import (
    AFFINE,
    AFFINE_OF_TWO,
    BOXES,
    DIFFERENCE,
    MODULUS,
    Distance,
    dot,
    to_unit_length,
    unit_length_gradients,
)

if TYPE_CHECKING:
    import tensorflow as tf

# Yang et al., 2015 (DistMult); Trouillon et al., 2016 (ComplEx); Hitchcock, 1927, with Lacroix et al., 2018 (CP);
# Balažević et al., 2019 (TuckER); Bordes et al., 2013 (TransE); Sun et al., 2019 (RotatE); Chao et al., 2021 (PairRE);
# Yu et al., 2022 (TripleRE); Wang et al., 2022 (InterHT); Zhang et al., 2022 (TranS); Abboud et al., 2020 (BoxE).

QueryGradients = tuple[Float32, Float32, dict[str, Float32]]
"""Gradients of given entities, of relations, and of further variables by name."""

Values = Literal["real", "complex", "phase"]
"""What a row holds: real numbers; complex ones, all real parts before all imaginary ones; or the phases of complex
numbers with the modulus 1."""

Parts = tuple[tuple[str, str], ...]
"""The parts of a row, from the first column to the last: name, and how the score uses it where that is not plain."""

Terms = tuple[tuple[int, int, int | None, int | None], ...]
"""`(p, sign, g, r)` each: adds `sign * (given entity's part g) * (relation's part r)` to part p of a query; None:
without that factor."""

Initial = Callable[[int], InitializerSpec]
"""The initial values of rows, given `dim`."""

_UNIT = "divided by its length before it is used"
_PLUS_ONE = "used with 1 added"
_ELU = "stored as x, used as elu(x) + 1"
_COMPLEX: Parts = (("real", ""), ("imaginary", ""))


def _by_dim(kind: Literal["normal", "uniform"], scale: float) -> Initial:
    """The standard deviation or bound is `scale / sqrt(dim)`."""
    return lambda dim: InitializerSpec(
        kind, -scale / math.sqrt(dim) if kind == "uniform" else 0.0, scale / math.sqrt(dim)
    )


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


class ScoreFunction(ABC):
    """One score function at one dimension.

    It has two halves. A *query* is computed once per triple from the given entity and the relation; it is then compared
    with many candidates for the other end. So heads and tails are scored by the same comparison, and workers send each
    other queries to be scored.

    Args:
        dim: float32 values of an entity, or of each of its parts; see `score_function`.
        norm: One of `norms`; None: the first of them.
        seed: Seed of further variables.

    Attributes:
        name: Name in `SCORES`.
        entity_parts, relation_parts: What their rows hold, in parts of `dim` columns; of `dim / 2` where entities are
            complex numbers, and of 1 for a bias.
        query_parts: How many times the first part of an entity a query is wide.
        entity_width, relation_width, query_width: float32 values of each.
        entities, relations: Initial values.
        entity_values, relation_values: What their rows hold.
        norms: The norms to choose from; none if the score has no norm or only one, and `why_no_norm` says why.
        sides: The ends that can be queried; without "head" if the function needs reciprocal relations.
        as_they_are: Whether `prepared` returns its argument; if not, it brings every part to length 1.
        dense: Names and initial values of further variables, float32.

    Raises:
        BadInput: an invalid dim or norm, or a norm of a score that has none.
    """

    name: str
    entity_parts: Parts = (("embedding", ""),)
    relation_parts: Parts = (("embedding", ""),)
    query_parts: int = 1
    entity_values: Values = "real"
    relation_values: Values = "real"
    norms: tuple[int, ...] = ()
    why_no_norm: str = "its score is a product and not a distance"
    sides: tuple[Side, ...] = ("head", "tail")
    as_they_are: bool = True
    dense: Mapping[str, Float32] = MappingProxyType({})
    distance: Distance | None = None
    """Of queries from candidates; None: the score is a dot product."""
    initial: tuple[Initial, ...] = (lambda dim: InitializerSpec("normal", 0.0, 0.05),)
    """Of entities and of relations, or one of both."""

    def __init__(self, dim: int, norm: int | None = None, seed: int = 0) -> None:
        if dim < 1:
            raise BadInput(f"{self.name} of dim {dim}: dim must be at least 1")
        if norm is not None and not self.norms:
            raise BadInput(f"norm {norm} of {self.name}: {self.why_no_norm}; leave the norm out")
        if self.entity_values == "complex" and dim % 2:
            raise BadInput(f"{self.name} of dim {dim}: rows hold real and imaginary parts, so dim must be even")
        self.dim = dim
        by = norm if norm is not None else (*self.norms, 1)[0]
        self.comparison = dot() if self.distance is None else self.distance.by(by)
        self.entity_width, self.relation_width = (parts[-1].last for parts in self.layout().values())
        self.query_width = self.query_parts * self._each
        self.entities, self.relations = self.initial[0](dim), self.initial[-1](dim)

    @property
    def _each(self) -> int:
        return self.dim // 2 if self.entity_values == "complex" else self.dim

    def layout(self) -> dict[str, tuple[RowPart, ...]]:
        """The parts of an "entity"'s and of a "relation"'s row, from the first column to the last."""
        found = {}
        for kind, parts in (("entity", self.entity_parts), ("relation", self.relation_parts)):
            lasts = [*accumulate(1 if name == "bias" else self._each for name, _ in parts)]
            bounds = zip(parts, [0, *lasts], lasts, strict=False)
            found[kind] = tuple(RowPart(name, first, last, meaning) for (name, meaning), first, last in bounds)
        return found

    def prepared(self, rows: Float32) -> Float32:
        """float32 `[n, entity_width]`: entities as queries and comparisons take them; may be `rows` itself."""
        if self.as_they_are:
            return rows
        return _joined([to_unit_length(part) for part in self._entity(rows)])

    def unprepared(self, rows: Float32, gradients: Float32) -> Float32:
        """Gradients of the rows from those of `prepared(rows)`; may be `gradients` itself."""
        if self.as_they_are:
            return gradients
        parts = zip(self._entity(rows), self._entity(gradients), strict=True)
        return _joined([unit_length_gradients(*part) for part in parts])

    @abstractmethod
    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """Queries for one end.

        Args:
            given: float32 `[b, entity_width]`: the prepared entities at the other end.
            relation: float32 `[b, relation_width]`.

        Returns:
            float32 `[b, query_width]`.
        """

    @abstractmethod
    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        """Gradients of `given`, `relation` and further variables, from those of the queries, `[b, query_width]`."""

    def exact_rows(self, rows: Float32) -> Float64:
        """`prepared(rows)` in double precision, float64 `[n, entity_width]`."""
        return cast(Float64, self.prepared(cast(Float32, rows.astype(np.float64))))

    def exact_query(self, rows: Float32, relation: Float32, side: Side) -> Float64:
        """Queries from raw entities `rows` (not prepared ones) in double precision, float64 `[b, query_width]`."""
        given, related = self.exact_rows(rows), relation.astype(np.float64)
        return cast(Float64, self.query(cast(Float32, given), cast(Float32, related), side))

    def bind(self, dense: Mapping[str, Float32]) -> None:
        """Uses these arrays as the further variables, by the names of `dense`."""
        self.dense = MappingProxyType(dict(dense))

    def score_triples(self, heads: Float32, relations: Float32, tails: Float32) -> Float32:
        """float32 `[b]`: scores of triples from their embeddings `[b, width]`."""
        queries = self.query(self.prepared(heads), relations, "tail")
        return self.comparison.scores(queries, self.prepared(tails), np.arange(len(queries))[:, None])[:, 0]

    def require_side(self, side: Side) -> None:
        """Raises BadInput if the function cannot query that end."""
        if side not in self.sides:
            raise BadInput(
                f"{self.name} answers tail queries only; train it with reciprocal relations, which turn each "
                "head query into a tail query"
            )

    def _entity(self, rows: Float32) -> list[Float32]:
        return np.split(rows, len(self.entity_parts), axis=1)


class TermScore(ScoreFunction):
    """A score whose queries are sums of products of parts, so that `terms` alone says values and gradients."""

    @abstractmethod
    def terms(self, sign: int) -> Terms:
        """The terms of a query, in the order of all sums; `sign` is 1 if it asks for tails, -1 for heads."""

    def related(self, relation: Float32) -> list[Float32]:
        """Parts of relations as terms use them."""
        return np.split(relation, len(self.relation_parts), axis=1)

    def unrelated(self, relation: Float32, gradients: list[Float32]) -> list[Float32]:
        """Gradients of the stored parts from those of `related(relation)`."""
        return gradients

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        entity, related, sums = self._entity(given), self.related(relation), dict[int, Float32]()
        for p, sign, g, r in self._terms(side):
            factors = [parts[k] for parts, k in ((entity, g), (related, r)) if k is not None]
            _add(sums, p, reduce(np.multiply, factors, cast(Float32, sign)))
        return _joined(_every(sums, self.query_parts, entity[0]))

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        entity, related = self._entity(given), self.related(relation)
        slopes = np.split(gradients, self.query_parts, axis=1)
        to_given, to_related = dict[int, Float32](), dict[int, Float32]()
        for p, sign, g, r in self._terms(side):
            if g is not None:
                _add(to_given, g, sign * slopes[p] if r is None else sign * slopes[p] * related[r])
            if r is not None:
                _add(to_related, r, sign * slopes[p] if g is None else sign * slopes[p] * entity[g])
        to_relation = self.unrelated(relation, _every(to_related, len(related), entity[0]))
        return _joined(_every(to_given, len(entity), entity[0])), _joined(to_relation), {}

    def _terms(self, side: Side) -> Terms:
        return self.terms(1 if side == "tail" else -1)


def _add(sums: dict[int, Float32], place: int, term: Float32) -> None:
    sums[place] = sums[place] + term if place in sums else term


def _joined(parts: list[Float32]) -> Float32:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)  # which would copy the only one


def _every(sums: Mapping[int, Float32], count: int, like: Float32) -> list[Float32]:
    return [sums[k] if k in sums else np.zeros_like(like) for k in range(count)]


class DistMult(TermScore):
    """`sum h * r * t`."""

    name = "DistMult"
    relation_parts = (("diagonal", ""),)

    def terms(self, sign: int) -> Terms:
        return ((0, 1, 0, 0),)


class ComplEx(TermScore):
    """`Re(sum h * r * conj(t))`; a row holds all real parts, then all imaginary ones: `dim / 2` complex numbers."""

    name = "ComplEx"
    entity_parts = relation_parts = _COMPLEX
    entity_values: Values = "complex"
    relation_values: Values = "complex"
    query_parts = 2

    def terms(self, sign: int) -> Terms:
        """`h * r`, or `t * conj(r)`."""
        return (0, 1, 0, 0), (0, -sign, 1, 1), (1, sign, 0, 1), (1, 1, 1, 0)


class CP(TermScore):
    """`sum h_as_head * r * t_as_tail`; an entity is `[as head, as tail]`, one vector for each role."""

    name = "CP"
    entity_parts = (("as head", ""), ("as tail", ""))
    relation_parts = (("diagonal", ""),)
    query_parts = 2

    def terms(self, sign: int) -> Terms:
        """`[0, h_as_head * r]` for tails, `[t_as_tail * r, 0]` for heads: 0 where a candidate's other role lies."""
        return ((1, 1, 0, 0) if sign > 0 else (0, 1, 1, 0),)


class TransE(TermScore):
    """`-|h + r - t|`, by the norm 1 or 2."""

    name = "TransE"
    relation_parts = (("translation", ""),)
    norms = (1, 2)
    distance = DIFFERENCE
    initial = (_by_dim("uniform", 6),)

    def terms(self, sign: int) -> Terms:
        return (0, 1, 0, None), (0, sign, None, 0)


class RotatE(ComplEx):
    """`-sum |h * r - t|` over complex numbers, where `r = exp(i phase)`: a relation has `dim / 2` phases.

    The sum of the moduli is the norm 1 of a complex vector; as in the paper, there is no other to choose.
    """

    name = "RotatE"
    relation_parts = (("phase", "an angle in radians: r = exp(i phase)"),)
    relation_values = "phase"
    why_no_norm = "its distance is always the sum of the moduli of the complex differences"
    distance = MODULUS
    initial = (_by_dim("uniform", 6), lambda dim: InitializerSpec("uniform", -math.pi, math.pi))

    def related(self, relation: Float32) -> list[Float32]:
        return [np.cos(relation), np.sin(relation)]

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        to_given, _, _ = super().query_gradients(given, relation, side, gradients)
        (real, imaginary), (x, y) = (self._entity(rows) for rows in (self.query(given, relation, side), gradients))
        to_angle = y * real - x * imaginary
        return to_given, to_angle if side == "tail" else -to_angle, {}


class PairRE(TermScore):
    """`-|h * r_h - t * r_t|`, entities brought to length 1; a relation is `[r_h, r_t]`."""

    name = "PairRE"
    entity_parts: Parts = (("embedding", _UNIT),)
    relation_parts: Parts = (("head scale", ""), ("tail scale", ""))
    query_parts = 2
    norms = (1, 2)
    as_they_are = False
    distance = AFFINE
    initial = (_by_dim("normal", 1), lambda dim: InitializerSpec("uniform", -1.0, 1.0))

    def terms(self, sign: int) -> Terms:
        """`h * r_h (+ r_m)` and `-r_t`, or `-t * r_t (+ r_m)` and `r_h`."""
        mine, other = (0, 1) if sign > 0 else (1, 0)
        middle = ((0, 1, None, 2),) if len(self.relation_parts) > 2 else ()
        return (0, sign, 0, mine), *middle, (1, -sign, None, other)


class TripleRE(PairRE):
    """`-|h * (r_h + 1) - t * (r_t + 1) + r_m|`, entities brought to length 1; a relation is `[r_h, r_t, r_m]`.

    The second version of the paper, with its constant u = 1.
    """

    name = "TripleRE"
    relation_parts = (("head scale", _PLUS_ONE), ("tail scale", _PLUS_ONE), ("translation", ""))

    def related(self, relation: Float32) -> list[Float32]:
        head, tail, middle = super().related(relation)
        return [head + np.float32(1), tail + np.float32(1), middle]


class InterHT(TermScore):
    """`-|h * (t' + 1) - t * (h' + 1) + r|`; an entity is `[e, e']`, each brought to length 1."""

    name = "InterHT"
    entity_parts = (("embedding", _UNIT), ("aid", f"{_UNIT}, then 1 is added"))
    relation_parts: Parts = (("translation", ""),)
    query_parts = 3
    norms = (1, 2)
    as_they_are = False
    distance = AFFINE_OF_TWO
    initial = (_by_dim("normal", 1),)

    def terms(self, sign: int) -> Terms:
        """With the given `g`: `sign g + r`, `-sign (g' + 1)`, `sign g`."""
        return (0, sign, 0, None), (2, sign, 0, None), (0, 1, None, 0), (1, -sign, 1, None), (1, -sign, None, None)


class TranS(InterHT):
    """`-|h * (t' + 1) - t * (h' + 1) + r1 * h + r2 + r3 * t|`; a relation is `[r1, r2, r3]`."""

    name = "TranS"
    relation_parts = (("head scale", ""), ("translation", ""), ("tail scale", ""))

    def terms(self, sign: int) -> Terms:
        mine, other = (0, 2) if sign > 0 else (2, 0)
        moved, both, _, *aid = super().terms(sign)
        return moved, both, (0, 1, None, 1), (0, 1, 0, mine), *aid, (1, 1, None, other)


class BoxE(TermScore):
    """`-|D(h + t', head box)| - |D(t + h', tail box)|`; an entity is `[point, bump]`.

    `D` is the distance of `BOXES`. A relation is `[head middle, head width, tail middle, tail width]`, where widths are
    kept as x and are `elu(x) + 1`, above 0.
    """

    name = "BoxE"
    entity_parts = (("point", ""), ("bump", "moves the point of the other end"))
    relation_parts = (("head middle", ""), ("head width", _ELU), ("tail middle", ""), ("tail width", _ELU))
    query_parts = 4
    norms = (2, 1)
    distance = BOXES
    initial = (_by_dim("uniform", 0.5),)

    def terms(self, sign: int) -> Terms:
        """A candidate's point, moved by the given entity's bump, belongs in the box of its own end; its bump moves
        the given entity's point in the other box."""
        own, other = (2, 0) if sign > 0 else (0, 2)
        first = (0, 1, 1, None), (0, -1, None, own), (1, 1, None, own + 1)
        return *first, (2, 1, 0, None), (2, -1, None, other), (3, 1, None, other + 1)

    def related(self, relation: Float32) -> list[Float32]:
        head, head_width, tail, tail_width = super().related(relation)
        return [head, _positive(head_width), tail, _positive(tail_width)]

    def unrelated(self, relation: Float32, gradients: list[Float32]) -> list[Float32]:
        _, head_width, _, tail_width = super().related(relation)
        to_head, to_head_width, to_tail, to_tail_width = gradients
        return [to_head, to_head_width * _slope(head_width), to_tail, to_tail_width * _slope(tail_width)]


def _positive(raw: Float32) -> Float32:
    return np.where(raw > 0, raw + np.float32(1), np.exp(np.minimum(raw, 0)))


def _slope(raw: Float32) -> Float32:
    return np.where(raw > 0, np.float32(1), np.exp(np.minimum(raw, 0)))


class TuckER(ScoreFunction):
    """`sum W[i, j, k] * h[i] * r[j] * t[k]`: every relation is a matrix, a combination of those of a common core W.

    Entities and relations have the same size. The paper's batch normalisation is left out, so that a query depends
    neither on its batch nor on the number of workers. The core has `dim`^3 values, the same on every worker.
    """

    name = "TuckER"

    def __init__(self, dim: int, norm: int | None = None, seed: int = 0) -> None:
        super().__init__(dim, norm)
        draw = np.random.Generator(np.random.Philox([dim, seed & (2**64 - 1)]))
        self.dense = MappingProxyType({"core": draw.uniform(-1, 1, (dim, dim, dim)).astype(np.float32)})

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        asked: Float32 = np.matmul(relation[:, None], self._matrices(given, self._core(side, given.dtype)))[:, 0]
        return asked

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        core, dim = self._core(side, given.dtype), self.dim
        to_relation: Float32 = np.matmul(self._matrices(given, core), gradients[:, :, None])[:, :, 0]
        outer = (relation[:, :, None] * gradients[:, None]).reshape(-1, dim * dim)  # [b, (j, k)]
        to_given = np.asarray(outer @ core.reshape(dim, -1).T, np.float32)
        to_core = np.asarray(given.T @ outer, np.float32).reshape(dim, dim, dim)
        if side == "head":
            to_core = np.ascontiguousarray(to_core.transpose(2, 1, 0))
        return to_given, to_relation, {"core": to_core}

    def _core(self, side: Side, dtype: np.dtype[np.float32]) -> Float32:
        """The core by (given, relation, asked)."""
        core = self.dense["core"].astype(dtype, copy=False)
        return core if side == "tail" else np.ascontiguousarray(core.transpose(2, 1, 0))

    def _matrices(self, given: Float32, core: Float32) -> Float32:
        """`[b, j, k]`: of every given entity, by relation and asked."""
        found: Float32 = (given @ core.reshape(self.dim, -1)).reshape(-1, self.dim, self.dim)
        return found


# ConvE, whose queries TensorFlow computes


Compiled = Callable[..., Sequence["tf.Tensor"]]
_FILTERS, _KERNEL = 32, 3
_SMALLEST_VARIANCE = 1e-5


class ConvE(ScoreFunction):
    """`relu(W relu(conv([h; r])) + b) . t + bias of t`; an entity is `[e, bias]`.

    Head and relation are reshaped to images of `height x (dim / height)`, one above the other. Both hidden layers use
    layer normalisation, where the paper has batch normalisation: so a query depends neither on the others of its batch,
    nor on the number of workers, nor on whether it is trained. Like the paper, it answers tail queries only: train it
    with reciprocal relations.

    Raises:
        BadInput: `dim`, without the bias, is not that of an image with height and width of at least 2.
    """

    name = "ConvE"
    entity_parts = (("embedding", ""), ("bias", "added to the score of an answer"))
    sides: tuple[Side, ...] = ("tail",)

    def __init__(self, dim: int, norm: int | None = None, seed: int = 0) -> None:
        super().__init__(dim, norm)
        self._height = next((h for h in (10, 8, 4, 2) if dim % h == 0 and dim // h >= 2), 0)
        if not self._height:
            raise BadInput(f"ConvE of dim {dim}: dim must be even and at least 4, to be laid as an image")
        self.query_width = dim + 1
        self.dense = MappingProxyType(self._variables(dim, seed))

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

    def _variables(self, dim: int, seed: int) -> dict[str, Float32]:
        flat = 2 * dim * _FILTERS  # the convolution pads, so that small images work
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


# Score functions by name


_DISTANCES = (TransE, RotatE, PairRE, TripleRE, BoxE, InterHT, TranS)
_PRODUCTS = (DistMult, ComplEx, ConvE, CP, TuckER)

SCORES: Mapping[str, type[ScoreFunction]] = MappingProxyType({maker.name: maker for maker in (*_DISTANCES, *_PRODUCTS)})
"""All score functions."""


def score_named(name: str) -> type[ScoreFunction]:
    """One of `SCORES`, in upper or lower case. Raises BadInput for an unknown name."""
    maker = {known.lower(): found for known, found in SCORES.items()}.get(name.lower())
    if maker is None:
        raise BadInput(f"score function {name!r}: known are {', '.join(SCORES)}")
    return maker


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
    return score_named(name)(dim, norm, seed)
