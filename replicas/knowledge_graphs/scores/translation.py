"""TransE (Bordes et al., 2013) and RotatE (Sun et al., 2019): relations move entities."""

from __future__ import annotations

import math

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import Side
from elastable.replicas.knowledge_graphs.scores.bilinear import halves
from elastable.replicas.knowledge_graphs.scores.function import RowPair, ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import NORMS
from elastable.replicas.knowledge_graphs.scores.kernels.distance import distance
from elastable.replicas.knowledge_graphs.scores.kernels.modulus import modulus

__all__ = ["RotatE", "TransE"]


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
