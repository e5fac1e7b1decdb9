"""DistMult (Yang et al., 2015) and ComplEx (Trouillon et al., 2016): dot products."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import Side
from elastable.replicas.knowledge_graphs.scores.function import RowPair, ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels.dot import Dot

__all__ = ["ComplEx", "DistMult", "halves"]

_SPREAD = 0.05


class DistMult(ScoreFunction):
    """`sum h * r * t`."""

    name = "DistMult"

    def __init__(self, dim: int) -> None:
        self.dim = self.entity_width = self.relation_width = self.query_width = dim
        self.comparison = Dot()
        self.entities = self.relations = InitializerSpec("normal", 0.0, _SPREAD)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        return given * relation

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        return gradients * relation, gradients * given


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
        if dim % 2:
            raise BadInput(f"ComplEx of dim {dim}: rows hold real and imaginary parts, so dim must be even")
        self.dim = self.entity_width = self.relation_width = self.query_width = dim
        self.comparison = Dot()
        self.entities = self.relations = InitializerSpec("normal", 0.0, _SPREAD)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """`h * r`, or `t * conj(r)`."""
        (a, b), (c, d) = halves(given), halves(relation)
        query = np.empty_like(given)
        real, imaginary = halves(query)
        if side == "tail":
            real[:], imaginary[:] = a * c - b * d, a * d + b * c
        else:
            real[:], imaginary[:] = a * c + b * d, b * c - a * d
        return query

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        (a, b), (c, d), (x, y) = halves(given), halves(relation), halves(gradients)
        sign = np.float32(1 if side == "tail" else -1)
        to_given = np.concatenate([x * c + sign * (y * d), y * c - sign * (x * d)], axis=1)
        to_relation = np.concatenate([x * a + y * b, sign * (y * a - x * b)], axis=1)
        return to_given, to_relation


def halves(rows: Float32) -> tuple[Float32, Float32]:
    """Views of the two halves of the columns: real and imaginary parts."""
    half = rows.shape[1] // 2
    return rows[:, :half], rows[:, half:]
