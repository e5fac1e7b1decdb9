"""Score functions by products: DistMult, ComplEx, CP and TuckER.

Yang et al., 2015; Trouillon et al., 2016; Hitchcock, 1927, with Lacroix et al., 2018; Balažević et al., 2019.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import Side
from elastable.replicas.knowledge_graphs.scores.function import RowPair, ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels import Dot

__all__ = ["CP", "ComplEx", "DistMult", "TuckER", "halves"]

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


class CP(ScoreFunction):
    """`sum h_as_head * r * t_as_tail`; an entity is `[as head, as tail]`, one vector for each role."""

    name = "CP"

    def __init__(self, dim: int) -> None:
        self.dim = self.relation_width = dim
        self.entity_width = self.query_width = 2 * dim
        self.comparison = Dot()
        self.entities = self.relations = InitializerSpec("normal", 0.0, _SPREAD)

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """`[0, h_as_head * r]` for tails, `[t_as_tail * r, 0]` for heads: 0 where a candidate's other role lies."""
        as_head, as_tail = halves(given)
        asked = (as_head if side == "tail" else as_tail) * relation
        empty = np.zeros_like(asked)
        return np.concatenate([empty, asked] if side == "tail" else [asked, empty], axis=1)

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        (as_head, as_tail), (to_head, to_tail) = halves(given), halves(gradients)
        mine, asked = (as_head, to_tail) if side == "tail" else (as_tail, to_head)
        to_mine, empty = asked * relation, np.zeros_like(relation)
        parts = [to_mine, empty] if side == "tail" else [empty, to_mine]
        return np.concatenate(parts, axis=1), asked * mine


class TuckER(ScoreFunction):
    """`sum W[i, j, k] * h[i] * r[j] * t[k]`: every relation is a matrix, a combination of those of a common core W.

    Entities and relations have the same size. The paper's batch normalisation is left out, so that a query depends
    neither on its batch nor on the number of workers.

    Args:
        dim: Size of an entity and of a relation, d; the core has d^3 values, the same on every worker.
        seed: Seed of the initial core.
    """

    name = "TuckER"

    def __init__(self, dim: int, seed: int = 0) -> None:
        self.dim = self.entity_width = self.relation_width = self.query_width = dim
        self.comparison = Dot()
        self.entities = self.relations = InitializerSpec("normal", 0.0, _SPREAD)
        draw = np.random.Generator(np.random.Philox([dim, seed & (2**64 - 1)]))
        self.dense = MappingProxyType({"core": draw.uniform(-1, 1, (dim, dim, dim)).astype(np.float32)})

    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        core = self._core(side, given.dtype)
        matrices = (given @ core.reshape(self.dim, -1)).reshape(-1, self.dim, self.dim)  # [b, j, k]
        asked: Float32 = np.matmul(relation[:, None], matrices)[:, 0]
        return asked

    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        """Without those of the core; see `all_gradients`."""
        to_given, to_relation, _ = self.all_gradients(given, relation, side, gradients)
        return to_given, to_relation

    def all_gradients(
        self, given: Float32, relation: Float32, side: Side, gradients: Float32
    ) -> tuple[Float32, Float32, dict[str, Float32]]:
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
