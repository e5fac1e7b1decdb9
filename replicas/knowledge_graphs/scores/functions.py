"""Score functions: how plausible a triple is, and how that changes with its embeddings."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, cast

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

# Yang et al., 2015 (DistMult); Trouillon et al., 2016 (ComplEx); Hitchcock, 1927, with Lacroix et al., 2018 (CP);
# Balažević et al., 2019 (TuckER); Bordes et al., 2013 (TransE); Sun et al., 2019 (RotatE); Chao et al., 2021 (PairRE);
# Yu et al., 2022 (TripleRE); Wang et al., 2022 (InterHT); Zhang et al., 2022 (TranS); Abboud et al., 2020 (BoxE).

QueryGradients = tuple[Float32, Float32, dict[str, Float32]]
"""Gradients of given entities, of relations, and of further variables by name."""

Values = Literal["real", "complex", "phase"]
"""What a row holds: real numbers; complex ones, all real parts before all imaginary ones; or the phases of complex
numbers with the modulus 1."""


class ScoreFunction(ABC):
    """One score function at one dimension.

    It has two halves. A *query* is computed once per triple from the given entity and the relation; it is then compared
    with many candidates for the other end. So heads and tails are scored by the same comparison, and workers send each
    other queries to be scored.

    Attributes:
        name: Name in `scores.SCORES`.
        entity_width, relation_width, query_width: float32 values of each.
        entities, relations: Initial values.
        entity_values, relation_values: What their rows hold.
        norms: The norms to choose from; none if the score has no norm or only one.
        sides: The ends that can be queried; without "head" if the function needs reciprocal relations.
        as_they_are: Whether `prepared` returns its argument.
        dense: Names and initial values of further variables, float32.
    """

    name: str
    dim: int
    entity_width: int
    relation_width: int
    query_width: int
    comparison: Comparison
    entities: InitializerSpec
    relations: InitializerSpec
    entity_values: Values = "real"
    relation_values: Values = "real"
    norms: tuple[int, ...] = ()
    sides: tuple[Side, ...] = ("head", "tail")
    as_they_are: bool = True
    dense: Mapping[str, Float32] = MappingProxyType({})

    def __init__(
        self, dim: int, comparison: Comparison, *initial: InitializerSpec, widths: tuple[int, int, int] = (1, 1, 1)
    ) -> None:
        """`initial`: of entities and of relations, or one of both; `widths`: how many times `dim` the three widths."""
        self.dim, self.comparison = dim, comparison
        self.entity_width, self.relation_width, self.query_width = (count * dim for count in widths)
        self.entities, self.relations = initial[0], initial[-1]

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
    entity_values = relation_values = "complex"

    def __init__(self, dim: int) -> None:
        _require_even(self.name, dim)
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


def _require_even(name: str, dim: int) -> None:
    if dim % 2:
        raise BadInput(f"{name} of dim {dim}: rows hold real and imaginary parts, so dim must be even")


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

    def __init__(self, dim: int) -> None:
        super().__init__(dim, Dot(), _NORMAL, widths=(2, 1, 2))

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
    entity_values, relation_values = "complex", "phase"

    def __init__(self, dim: int) -> None:
        _require_even(self.name, dim)
        bound, phases = 6 / math.sqrt(dim), InitializerSpec("uniform", -math.pi, math.pi)
        super().__init__(dim, modulus(), InitializerSpec("uniform", -bound, bound), phases)
        self.relation_width = dim // 2

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
    norms = NORMS
    as_they_are = False
    _middle = False
    _offset = np.float32(0)

    def __init__(self, dim: int, norm: int = 1) -> None:
        initial = InitializerSpec("normal", 0.0, 1 / math.sqrt(dim)), InitializerSpec("uniform", -1.0, 1.0)
        super().__init__(dim, affine(norm), *initial, widths=(1, 3 if self._middle else 2, 2))

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
    _middle = True
    _offset = np.float32(1)


_ONE = np.float32(1)


class InterHT(ScoreFunction):
    """`-|h * (t' + 1) - t * (h' + 1) + r|`; an entity is `[e, e']`, each brought to length 1."""

    name = "InterHT"
    norms = NORMS
    as_they_are = False

    def __init__(self, dim: int, norm: int = 1) -> None:
        initial = InitializerSpec("normal", 0.0, 1 / math.sqrt(dim))
        super().__init__(dim, affine_of_two(norm), initial, widths=(2, 1, 3))

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

    def __init__(self, dim: int, norm: int = 1) -> None:
        super().__init__(dim, norm)
        self.relation_width = 3 * dim

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
    norms = NORMS

    def __init__(self, dim: int, norm: int = 2) -> None:
        bound = 0.5 / math.sqrt(dim)
        super().__init__(dim, boxes(norm), InitializerSpec("uniform", -bound, bound), widths=(2, 4, 4))

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
