"""InterHT (Wang et al., 2022) and TranS (Zhang et al., 2022): each entity has an aid that acts on the other."""

from __future__ import annotations

import math

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.replicas.knowledge_graphs.graph import Side
from elastable.replicas.knowledge_graphs.scores.bilinear import halves
from elastable.replicas.knowledge_graphs.scores.function import RowPair, ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels.affine import affine_of_two
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import NORMS
from elastable.replicas.knowledge_graphs.scores.kernels.unit_length import to_unit_length, unit_length_gradients

__all__ = ["InterHT", "TranS"]

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
