"""Score functions: how plausible a triple is, and how that changes with its embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import Side
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import Comparison

__all__ = ["ScoreFunction"]


class ScoreFunction(ABC):
    """One score function at one dimension.

    It falls into two halves. A *query* is made of the entity that is given and
    the relation, once a triple; the query is then compared with the candidates
    for the other end, many a triple. So heads and tails are scored by the same
    comparison, and what a worker sends others to be scored is its queries.

    Attributes:
        name: As in `elastable.replicas.knowledge_graphs.scores.SCORES`.
        dim: As it was asked for.
        entity_width: float32 values of an entity's embedding.
        relation_width: Of a relation's.
        query_width: Of a query.
        comparison: Of queries with candidates.
        entities: Initial values of the entities.
        relations: Initial values of the relations.
        sides: Which ends can be asked for; "head" alone is missing, where a
            score function needs reciprocal relations.
        as_they_are: Whether `prepared` gives back what it is given.
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
    sides: tuple[Side, ...] = ("head", "tail")
    as_they_are: bool = True
    dense: Mapping[str, Float32] = MappingProxyType({})

    def prepared(self, rows: Float32) -> Float32:
        """Entities as queries and comparisons take them, float32 `[n, entity_width]`; may be `rows` itself."""
        return rows

    def unprepared(self, rows: Float32, gradients: Float32) -> Float32:
        """Gradients of the rows, of those of `prepared(rows)`; may be `gradients` itself."""
        return gradients

    @abstractmethod
    def query(self, given: Float32, relation: Float32, side: Side) -> Float32:
        """Queries for one end.

        Args:
            given: float32 `[b, entity_width]`, prepared: of the entities at the other end.
            relation: float32 `[b, relation_width]`.
            side: Which end is asked for.

        Returns:
            float32 `[b, query_width]`.
        """

    @abstractmethod
    def query_gradients(
        self, given: Float32, relation: Float32, side: Side, gradients: Float32
    ) -> tuple[Float32, Float32]:
        """Of what `query` was given.

        Args:
            given, relation, side: As there.
            gradients: float32 `[b, query_width]`, of its result.

        Returns:
            Of `given` and of `relation`, of their shapes.
        """

    def all_gradients(
        self, given: Float32, relation: Float32, side: Side, gradients: Float32
    ) -> tuple[Float32, Float32, dict[str, Float32]]:
        """As `query_gradients`, and those of the further variables, by name."""
        return *self.query_gradients(given, relation, side, gradients), {}

    def bind(self, dense: Mapping[str, Float32]) -> None:
        """Makes these arrays, by the names of `dense`, the further variables from now on."""
        self.dense = MappingProxyType(dict(dense))

    # -- scores of what is at hand

    def score_triples(self, heads: Float32, relations: Float32, tails: Float32) -> Float32:
        """float32 `[b]`: of triples, by their embeddings `[b, width]`."""
        queries = self.query(self.prepared(heads), relations, "tail")
        return self.comparison.scores(queries, self.prepared(tails), np.arange(len(queries))[:, None])[:, 0]

    def score_heads(self, candidates: Float32, relations: Float32, tails: Float32) -> Float32:
        """float32 `[b, n]`: of candidates for the heads, `[n, width]` shared or `[b, n, width]` per triple."""
        return self._against(candidates, tails, relations, "head")

    def score_tails(self, heads: Float32, relations: Float32, candidates: Float32) -> Float32:
        """float32 `[b, n]`: of candidates for the tails, `[n, width]` shared or `[b, n, width]` per triple."""
        return self._against(candidates, heads, relations, "tail")

    def require_side(self, side: Side) -> None:
        """Raises BadInput where the function cannot ask for that end."""
        if side not in self.sides:
            raise BadInput(
                f"{self.name} asks for tails only; train it with reciprocal relations, which turn each "
                "question for a head into one for a tail"
            )

    def _against(self, candidates: Float32, given: Float32, relations: Float32, side: Side) -> Float32:
        self.require_side(side)
        rows = np.ascontiguousarray(candidates.reshape(-1, self.entity_width))
        groups = 1 if candidates.ndim == 2 else len(candidates)
        places = np.arange(len(rows)).reshape(groups, -1)
        queries = self.query(self.prepared(given), relations, side)
        return self.comparison.scores(queries, self.prepared(rows), places)
