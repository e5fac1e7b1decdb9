"""PairRE (Chao et al., 2021) and TripleRE (Yu et al., 2022): a relation scales head and tail apart."""

from __future__ import annotations

import math

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.replicas.knowledge_graphs.graph import Side
from elastable.replicas.knowledge_graphs.scores.function import RowPair, ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels.affine import affine
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import NORMS
from elastable.replicas.knowledge_graphs.scores.kernels.unit_length import to_unit_length, unit_length_gradients

__all__ = ["PairRE", "TripleRE"]


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
