"""Score functions: how plausible a triple is, and how that changes with its embeddings."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import Side
from elastable.replicas.knowledge_graphs.scores.comparison import (
    NORMS,
    Comparison,
    affine,
    affine_of_two,
    boxes,
    distance,
    modulus,
    to_unit_length,
    unit_length_gradients,
)
from elastable.replicas.knowledge_graphs.scores.dot_products import Dot

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

_UNIT = "divided by its length before it is used"
_PLUS_ONE = "used with 1 added"
_ELU = "stored as x, used as elu(x) + 1"
_COMPLEX: Parts = (("real", ""), ("imaginary", ""))


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

    Attributes:
        name: Name in `SCORES`.
        entity_parts, relation_parts: What their rows hold, in parts of `dim` columns; of `dim / 2` where entities are
            complex numbers, and of 1 for a bias.
        query_parts: How many times `dim` a query is wide.
        entity_width, relation_width, query_width: float32 values of each.
        entities, relations: Initial values.
        entity_values, relation_values: What their rows hold.
        norms: The norms to choose from; none if the score has no norm or only one, and `why_no_norm` says why.
        sides: The ends that can be queried; without "head" if the function needs reciprocal relations.
        as_they_are: Whether `prepared` returns its argument.
        dense: Names and initial values of further variables, float32.

    Raises:
        BadInput: `dim` is odd, and entities are complex numbers.
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

    def __init__(self, dim: int, comparison: Comparison, *initial: InitializerSpec) -> None:
        """`initial`: of entities and of relations, or one of both."""
        if self.entity_values == "complex" and dim % 2:
            raise BadInput(f"{self.name} of dim {dim}: rows hold real and imaginary parts, so dim must be even")
        self.dim, self.comparison = dim, comparison
        self.entity_width, self.relation_width = (parts[-1].last for parts in self.layout().values())
        self.query_width = self.query_parts * dim
        self.entities, self.relations = initial[0], initial[-1]

    def layout(self) -> dict[str, tuple[RowPart, ...]]:
        """The parts of an "entity"'s and of a "relation"'s row, from the first column to the last."""
        each, found = self.dim // 2 if self.entity_values == "complex" else self.dim, {}
        for kind, parts in (("entity", self.entity_parts), ("relation", self.relation_parts)):
            lasts = [*accumulate(1 if name == "bias" else each for name, _ in parts)]
            bounds = zip(parts, [0, *lasts], lasts, strict=False)
            found[kind] = tuple(RowPart(name, first, last, meaning) for (name, meaning), first, last in bounds)
        return found

    def prepared(self, rows: Float32) -> Float32:
        """float32 `[n, entity_width]`: entities as queries and comparisons take them; may be `rows` itself."""
        return rows

    def unprepared(self, rows: Float32, gradients: Float32) -> Float32:
        """Gradients of the rows from those of `prepared(rows)`; may be `gradients` itself."""
        return gradients

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


_NORMAL = InitializerSpec("normal", 0.0, 0.05)


class DistMult(ScoreFunction):
    """`sum h * r * t`."""

    name = "DistMult"
    relation_parts = (("diagonal", ""),)

    def __init__(self, dim: int) -> None:
        super().__init__(dim, Dot(), _NORMAL)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        return given * relation

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        return gradients * relation, gradients * given, {}


class ComplEx(ScoreFunction):
    """`Re(sum h * r * conj(t))`; a row holds all real parts, then all imaginary ones.

    Args:
        dim: float32 values of a row, so `dim / 2` complex numbers.

    Raises:
        BadInput: `dim` is odd.
    """

    name = "ComplEx"
    entity_parts = relation_parts = _COMPLEX
    entity_values = relation_values = "complex"

    def __init__(self, dim: int) -> None:
        super().__init__(dim, Dot(), _NORMAL)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """`h * r`, or `t * conj(r)`."""
        return _times(given, *self._factor(relation, side))

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        (a, b), (x, y) = halves(given), halves(gradients)
        sign = np.float32(1 if side == "tail" else -1)
        to_relation = np.concatenate([x * a + y * b, sign * (y * a - x * b)], axis=1)
        return _times_conjugate(gradients, *self._factor(relation, side)), to_relation, {}

    @staticmethod
    def _factor(relation: Float32, side: Side) -> tuple[Float32, Float32]:
        real, imaginary = halves(relation)
        return real, imaginary if side == "tail" else -imaginary


def _times(rows: Float32, c: Float32, d: Float32) -> Float32:
    """Complex rows times c + d i."""
    a, b = halves(rows)
    return np.concatenate([a * c - b * d, a * d + b * c], axis=1)


def _times_conjugate(rows: Float32, c: Float32, d: Float32) -> Float32:
    """Complex rows times c - d i."""
    a, b = halves(rows)
    return np.concatenate([a * c + b * d, b * c - a * d], axis=1)


def halves(rows: Float32) -> tuple[Float32, Float32]:
    """Views of the two halves of the columns: real and imaginary parts."""
    half = rows.shape[1] // 2
    return rows[:, :half], rows[:, half:]


class CP(ScoreFunction):
    """`sum h_as_head * r * t_as_tail`; an entity is `[as head, as tail]`, one vector for each role."""

    name = "CP"
    entity_parts = (("as head", ""), ("as tail", ""))
    relation_parts = (("diagonal", ""),)
    query_parts = 2

    def __init__(self, dim: int) -> None:
        super().__init__(dim, Dot(), _NORMAL)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """`[0, h_as_head * r]` for tails, `[t_as_tail * r, 0]` for heads: 0 where a candidate's other role lies."""
        as_head, as_tail = halves(given)
        asked = (as_head if side == "tail" else as_tail) * relation
        empty = np.zeros_like(asked)
        return np.concatenate([empty, asked] if side == "tail" else [asked, empty], axis=1)

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        (as_head, as_tail), (to_head, to_tail) = halves(given), halves(gradients)
        mine, asked = (as_head, to_tail) if side == "tail" else (as_tail, to_head)
        to_mine, empty = asked * relation, np.zeros_like(relation)
        parts = [to_mine, empty] if side == "tail" else [empty, to_mine]
        return np.concatenate(parts, axis=1), asked * mine, {}


class TuckER(ScoreFunction):
    """`sum W[i, j, k] * h[i] * r[j] * t[k]`: every relation is a matrix, a combination of those of a common core W.

    Entities and relations have the same size. The paper's batch normalisation is left out, so that a query depends
    neither on its batch nor on the number of workers.

    Args:
        dim: Size of an entity and of a relation, d; the core has d^3 values, the same on every worker.
    """

    name = "TuckER"

    def __init__(self, dim: int, seed: int = 0) -> None:
        super().__init__(dim, Dot(), _NORMAL)
        draw = np.random.Generator(np.random.Philox([dim, seed & (2**64 - 1)]))
        self.dense = MappingProxyType({"core": draw.uniform(-1, 1, (dim, dim, dim)).astype(np.float32)})

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        core = self._core(side, given.dtype)
        matrices = (given @ core.reshape(self.dim, -1)).reshape(-1, self.dim, self.dim)  # [b, j, k]
        asked: Float32 = np.matmul(relation[:, None], matrices)[:, 0]
        return asked

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        core, dim = self._core(side, given.dtype), self.dim
        matrices = (given @ core.reshape(dim, -1)).reshape(-1, dim, dim)
        to_relation: Float32 = np.matmul(matrices, gradients[:, :, None])[:, :, 0]
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


class TransE(ScoreFunction):
    """`-|h + r - t|`, by the norm 1 or 2."""

    name = "TransE"
    relation_parts = (("translation", ""),)
    norms = NORMS

    def __init__(self, dim: int, norm: int = 1) -> None:
        bound = 6 / math.sqrt(dim)
        super().__init__(dim, distance(norm), InitializerSpec("uniform", -bound, bound))

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        return given + relation if side == "tail" else given - relation

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        return gradients, gradients if side == "tail" else -gradients, {}


class RotatE(ScoreFunction):
    """`-sum |h * r - t|` over complex numbers, where `r = exp(i phase)`.

    The sum of the moduli is the norm 1 of a complex vector; as in the paper, there is no other to choose.

    Args:
        dim: float32 values of an entity: `dim / 2` complex numbers, and as many phases of a relation.

    Raises:
        BadInput: `dim` is odd.
    """

    name = "RotatE"
    entity_parts, relation_parts = _COMPLEX, (("phase", "an angle in radians: r = exp(i phase)"),)
    entity_values, relation_values = "complex", "phase"
    why_no_norm = "its distance is always the sum of the moduli of the complex differences"

    def __init__(self, dim: int) -> None:
        bound, phases = 6 / math.sqrt(dim), InitializerSpec("uniform", -math.pi, math.pi)
        super().__init__(dim, modulus(), InitializerSpec("uniform", -bound, bound), phases)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """Rotates back for heads."""
        return _times(given, *self._turn(relation, side))

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        (a, b), (x, y) = halves(given), halves(gradients)
        c, d = self._turn(relation, side)
        to_angle = x * -(a * d + b * c) + y * (a * c - b * d)
        return _times_conjugate(gradients, c, d), to_angle if side == "tail" else -to_angle, {}

    @staticmethod
    def _turn(relation: Float32, side: Side) -> tuple[Float32, Float32]:
        sine = np.sin(relation)
        return np.cos(relation), sine if side == "tail" else -sine


class PairRE(ScoreFunction):
    """`-|h * r_h - t * r_t|`, entities brought to length 1; a relation is `[r_h, r_t]`."""

    name = "PairRE"
    entity_parts: Parts = (("embedding", _UNIT),)
    relation_parts: Parts = (("head scale", ""), ("tail scale", ""))
    query_parts = 2
    norms = NORMS
    as_they_are = False
    _middle = False
    _offset = np.float32(0)

    def __init__(self, dim: int, norm: int = 1) -> None:
        initial = InitializerSpec("normal", 0.0, 1 / math.sqrt(dim)), InitializerSpec("uniform", -1.0, 1.0)
        super().__init__(dim, affine(norm), *initial)

    def prepared(self, rows: Float32) -> Float32:
        return to_unit_length(rows)

    def unprepared(self, rows: Float32, gradients: Float32) -> Float32:
        return unit_length_gradients(rows, gradients)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """`h * r_h (+ r_m)` and `-r_t`, or `-t * r_t (+ r_m)` and `r_h`."""
        mine, other = self._scales(relation, side)
        sign = np.float32(1 if side == "tail" else -1)
        fixed = sign * given * mine
        if self._middle:
            fixed += relation[:, 2 * self.dim :]
        return np.concatenate([fixed, -sign * other], axis=1)

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        mine, _ = self._scales(relation, side)
        to_fixed, to_other = gradients[:, : self.dim], gradients[:, self.dim :]
        sign = np.float32(1 if side == "tail" else -1)
        parts = [sign * to_fixed * given, -sign * to_other]
        if side == "head":
            parts.reverse()
        if self._middle:
            parts.append(to_fixed)
        return sign * to_fixed * mine, np.concatenate(parts, axis=1), {}

    def _scales(self, relation: Float32, side: Side) -> tuple[Float32, Float32]:
        """The scales of the given and of the queried entity."""
        head, tail = relation[:, : self.dim] + self._offset, relation[:, self.dim : 2 * self.dim] + self._offset
        return (head, tail) if side == "tail" else (tail, head)


class TripleRE(PairRE):
    """`-|h * (r_h + 1) - t * (r_t + 1) + r_m|`, entities brought to length 1; a relation is `[r_h, r_t, r_m]`.

    The second version of the paper, with its constant u = 1.
    """

    name = "TripleRE"
    relation_parts = (("head scale", _PLUS_ONE), ("tail scale", _PLUS_ONE), ("translation", ""))
    _middle = True
    _offset = np.float32(1)


_ONE = np.float32(1)


class InterHT(ScoreFunction):
    """`-|h * (t' + 1) - t * (h' + 1) + r|`; an entity is `[e, e']`, each brought to length 1."""

    name = "InterHT"
    entity_parts: Parts = (("embedding", _UNIT), ("aid", f"{_UNIT}, then 1 is added"))
    relation_parts: Parts = (("translation", ""),)
    query_parts = 3
    norms = NORMS
    as_they_are = False

    def __init__(self, dim: int, norm: int = 1) -> None:
        initial = InitializerSpec("normal", 0.0, 1 / math.sqrt(dim))
        super().__init__(dim, affine_of_two(norm), initial)

    def prepared(self, rows: Float32) -> Float32:
        return np.concatenate([to_unit_length(part) for part in halves(rows)], axis=1)

    def unprepared(self, rows: Float32, gradients: Float32) -> Float32:
        parts = zip(halves(rows), halves(gradients), strict=True)
        return np.concatenate([unit_length_gradients(row, gradient) for row, gradient in parts], axis=1)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """With `s = 1` for tails, `-1` for heads: `s g + r`, `-s (g' + 1)`, `s g`."""
        entity, aid = halves(given)
        sign = np.float32(1 if side == "tail" else -1)
        return np.concatenate([sign * entity + relation, -sign * (aid + _ONE), sign * entity], axis=1)

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        sign = np.float32(1 if side == "tail" else -1)
        a, b, c = np.split(gradients, 3, axis=1)
        return np.concatenate([sign * (a + c), -sign * b], axis=1), a, {}


class TranS(InterHT):
    """`-|h * (t' + 1) - t * (h' + 1) + r1 * h + r2 + r3 * t|`; a relation is `[r1, r2, r3]`."""

    name = "TranS"
    relation_parts = (("head scale", ""), ("translation", ""), ("tail scale", ""))

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        r1, r2, r3 = np.split(relation, 3, axis=1)
        mine, other = (r1, r3) if side == "tail" else (r3, r1)
        query = super().query(given, r2, side)
        query[:, : self.dim] += mine * halves(given)[0]
        query[:, self.dim : 2 * self.dim] += other
        return query

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        r1, r2, r3 = np.split(relation, 3, axis=1)
        to_given, to_middle, _ = super().query_gradients(given, r2, side, gradients)
        to_mine, to_other = to_middle * halves(given)[0], gradients[:, self.dim : 2 * self.dim]
        to_given[:, : self.dim] += to_middle * (r1 if side == "tail" else r3)
        outer = (to_mine, to_other) if side == "tail" else (to_other, to_mine)
        return to_given, np.concatenate([outer[0], to_middle, outer[1]], axis=1), {}


class BoxE(ScoreFunction):
    """`-|D(h + t', head box)| - |D(t + h', tail box)|`; an entity is `[point, bump]`.

    `D` is the distance of `boxes`. A relation is `[head middle, head width, tail middle, tail width]`, where widths are
    kept as x and are `elu(x) + 1`, above 0.
    """

    name = "BoxE"
    entity_parts = (("point", ""), ("bump", "moves the point of the other end"))
    relation_parts = (("head middle", ""), ("head width", _ELU), ("tail middle", ""), ("tail width", _ELU))
    query_parts = 4
    norms = NORMS

    def __init__(self, dim: int, norm: int = 2) -> None:
        bound = 0.5 / math.sqrt(dim)
        super().__init__(dim, boxes(norm), InitializerSpec("uniform", -bound, bound))

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """A candidate's point, moved by the given entity's bump, belongs in the box of its own end; its bump moves
        the given entity's point in the other box."""
        point, bump = halves(given)
        (middle, width), (other_middle, other_width) = self._boxes(relation, side)
        return np.concatenate([bump - middle, _positive(width), point - other_middle, _positive(other_width)], axis=1)

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> QueryGradients:
        (_, width), (_, other_width) = self._boxes(relation, side)
        to_bump, to_width, to_point, to_other = np.split(gradients, 4, axis=1)
        asked = [-to_bump, to_width * _slope(width)]
        known = [-to_point, to_other * _slope(other_width)]
        parts = [*known, *asked] if side == "tail" else [*asked, *known]
        return np.concatenate([to_point, to_bump], axis=1), np.concatenate(parts, axis=1), {}

    @staticmethod
    def _boxes(relation: Float32, side: Side) -> tuple[tuple[Float32, Float32], tuple[Float32, Float32]]:
        """Middle and raw width of the queried end's box, and of the other's."""
        head_middle, head_width, tail_middle, tail_width = np.split(relation, 4, axis=1)
        head, tail = (head_middle, head_width), (tail_middle, tail_width)
        return (tail, head) if side == "tail" else (head, tail)


def _positive(raw: Float32) -> Float32:
    return np.where(raw > 0, raw + np.float32(1), np.exp(np.minimum(raw, 0)))


def _slope(raw: Float32) -> Float32:
    return np.where(raw > 0, np.float32(1), np.exp(np.minimum(raw, 0)))


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

    Args:
        dim: Size of an entity, without its bias.

    Raises:
        BadInput: `dim` is not that of an image with height and width of at least 2.
    """

    name = "ConvE"
    entity_parts = (("embedding", ""), ("bias", "added to the score of an answer"))
    sides: tuple[Side, ...] = ("tail",)

    def __init__(self, dim: int, seed: int = 0) -> None:
        self._height = next((h for h in (10, 8, 4, 2) if dim % h == 0 and dim // h >= 2), 0)
        if not self._height:
            raise BadInput(f"ConvE of dim {dim}: dim must be even and at least 4, to be laid as an image")
        super().__init__(dim, Dot(), InitializerSpec("normal", 0.0, 0.05))
        self.query_width = dim + 1
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


# Score functions by name


_DISTANCES = (TransE, RotatE, PairRE, TripleRE, BoxE, InterHT, TranS)
_PRODUCTS = (DistMult, ComplEx, ConvE, CP, TuckER)

SCORES: Mapping[str, type[ScoreFunction]] = MappingProxyType({maker.name: maker for maker in (*_DISTANCES, *_PRODUCTS)})
"""All score functions."""


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
        raise BadInput(f"norm {norm} of {maker.name}: {maker.why_no_norm}; leave the norm out")
    if maker in (ConvE, TuckER):
        chosen["seed"] = seed
    return cast(Callable[..., ScoreFunction], maker)(dim, **chosen)
