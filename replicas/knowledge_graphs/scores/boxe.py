"""BoxE (Abboud et al., 2020): a relation is a box for its heads and one for its tails."""

from __future__ import annotations

import math

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.replicas.knowledge_graphs.graph import Side
from elastable.replicas.knowledge_graphs.scores.bilinear import halves
from elastable.replicas.knowledge_graphs.scores.function import RowPair, ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels.boxes import boxes
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import NORMS

__all__ = ["BoxE"]


class BoxE(ScoreFunction):
    """`-|D(h + t', head box)| - |D(t + h', tail box)|`; an entity is `[point, bump]`.

    `D` is the distance of `elastable.replicas.knowledge_graphs.scores.kernels.boxes`. A relation is `[head middle, head
    width, tail middle, tail width]`, where widths are kept as x and are `elu(x) + 1`, above 0.
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
