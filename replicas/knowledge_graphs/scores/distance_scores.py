"""Score functions by distances: TransE, RotatE, PairRE, TripleRE, InterHT, TranS and BoxE.

Bordes et al., 2013; Sun et al., 2019; Chao et al., 2021; Yu et al., 2022; Wang et al., 2022; Zhang et al., 2022; Abboud
et al., 2020. Relations move entities (the first two), scale head and tail apart (the next two) or act through an aid of
each entity (InterHT, TranS); of BoxE a relation is a box for its heads and one for its tails.
"""

from __future__ import annotations

import math

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import Side
from elastable.replicas.knowledge_graphs.scores.function import RowPair, ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels import (
    NORMS,
    affine,
    affine_of_two,
    boxes,
    distance,
    modulus,
    to_unit_length,
    unit_length_gradients,
)
from elastable.replicas.knowledge_graphs.scores.product_scores import halves

__all__ = ["BoxE", "InterHT", "PairRE", "RotatE", "TranS", "TransE", "TripleRE"]


class TransE(ScoreFunction):
    """`-|h + r - t|`, by the norm 1 or 2."""

    name = "TransE"
    norms = NORMS

    def __init__(self, dim: int, norm: int = 1) -> None:
        self.dim = self.entity_width = self.relation_width = self.query_width = dim
        self.comparison = distance(norm)
        bound = 6 / math.sqrt(dim)
        self.entities = self.relations = InitializerSpec("uniform", -bound, bound)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        return given + relation if side == "tail" else given - relation

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        return gradients, gradients if side == "tail" else -gradients


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
        if dim % 2:
            raise BadInput(f"RotatE of dim {dim}: rows hold real and imaginary parts, so dim must be even")
        self.dim = self.entity_width = self.query_width = dim
        self.relation_width = dim // 2
        self.comparison = modulus()
        bound = 6 / math.sqrt(dim)
        self.entities = InitializerSpec("uniform", -bound, bound)
        self.relations = InitializerSpec("uniform", -math.pi, math.pi)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """Rotates back for heads."""
        a, b = halves(given)
        c, d = self._turn(relation, side)
        return np.concatenate([a * c - b * d, a * d + b * c], axis=1)

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        (a, b), (x, y) = halves(given), halves(gradients)
        c, d = self._turn(relation, side)
        to_given = np.concatenate([x * c + y * d, y * c - x * d], axis=1)
        to_angle = x * -(a * d + b * c) + y * (a * c - b * d)
        return to_given, to_angle if side == "tail" else -to_angle

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
        self.dim = self.entity_width = dim
        self.relation_width = (3 if self._middle else 2) * dim
        self.query_width = 2 * dim
        self.comparison = affine(norm)
        self.entities = InitializerSpec("normal", 0.0, 1 / math.sqrt(dim))
        self.relations = InitializerSpec("uniform", -1.0, 1.0)

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

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        mine, _ = self._scales(relation, side)
        to_fixed, to_other = gradients[:, : self.dim], gradients[:, self.dim :]
        sign = np.float32(1 if side == "tail" else -1)
        parts = [sign * to_fixed * given, -sign * to_other]
        if side == "head":
            parts.reverse()
        if self._middle:
            parts.append(to_fixed)
        return sign * to_fixed * mine, np.concatenate(parts, axis=1)

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
        self.dim = dim
        self.entity_width = 2 * dim
        self.relation_width = dim
        self.query_width = 3 * dim
        self.comparison = affine_of_two(norm)
        self.entities = InitializerSpec("normal", 0.0, 1 / math.sqrt(dim))
        self.relations = InitializerSpec("normal", 0.0, 1 / math.sqrt(dim))

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

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        sign = np.float32(1 if side == "tail" else -1)
        a, b, c = np.split(gradients, 3, axis=1)
        return np.concatenate([sign * (a + c), -sign * b], axis=1), a


class TranS(InterHT):
    """`-|h * (t' + 1) - t * (h' + 1) + r1 * h + r2 + r3 * t|`; a relation is `[r1, r2, r3]`.

    The relation combines three vectors, by the entities that it connects.
    """

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

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        r1, r2, r3 = np.split(relation, 3, axis=1)
        to_given, to_middle = super().query_gradients(given, r2, side, gradients)
        to_mine, to_other = to_middle * halves(given)[0], gradients[:, self.dim : 2 * self.dim]
        to_given[:, : self.dim] += to_middle * (r1 if side == "tail" else r3)
        outer = (to_mine, to_other) if side == "tail" else (to_other, to_mine)
        return to_given, np.concatenate([outer[0], to_middle, outer[1]], axis=1)


class BoxE(ScoreFunction):
    """`-|D(h + t', head box)| - |D(t + h', tail box)|`; an entity is `[point, bump]`.

    `D` is the distance of `boxes`. A relation is `[head middle, head width, tail middle, tail width]`, where widths are
    kept as x and are `elu(x) + 1`, above 0.
    """

    name = "BoxE"
    norms = NORMS

    def __init__(self, dim: int, norm: int = 2) -> None:
        self.dim = dim
        self.entity_width = 2 * dim
        self.relation_width = self.query_width = 4 * dim
        self.comparison = boxes(norm)
        bound = 0.5 / math.sqrt(dim)
        self.entities = self.relations = InitializerSpec("uniform", -bound, bound)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """A candidate's point, moved by the given entity's bump, belongs in the box of its own end; its bump moves
        the given entity's point in the other box."""
        point, bump = halves(given)
        (middle, width), (other_middle, other_width) = self._boxes(relation, side)
        return np.concatenate([bump - middle, _positive(width), point - other_middle, _positive(other_width)], axis=1)

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        (_, width), (_, other_width) = self._boxes(relation, side)
        to_bump, to_width, to_point, to_other = np.split(gradients, 4, axis=1)
        asked = [-to_bump, to_width * _slope(width)]
        known = [-to_point, to_other * _slope(other_width)]
        parts = [*known, *asked] if side == "tail" else [*asked, *known]
        return np.concatenate([to_point, to_bump], axis=1), np.concatenate(parts, axis=1)

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
