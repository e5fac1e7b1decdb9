"""Score functions: how plausible a triple is, and how that changes with its embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import Side
from elastable.replicas.knowledge_graphs.scores.kernels import Comparison

__all__ = ["RowPair", "ScoreFunction", "Values"]

RowPair = tuple[Float32, Float32]
"""Rows of given entities, and of relations."""

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
        dim: The requested dimension.
        entity_width, relation_width, query_width: float32 values of each.
        comparison: Compares queries with candidates.
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
            side: The queried end.

        Returns:
            float32 `[b, query_width]`.
        """

    @abstractmethod
    def query_gradients(self, given: Float32, relation: Float32, side: Side, gradients: Float32) -> RowPair:
        """Gradients of `given` and `relation`, from those of `query`'s result (float32 `[b, query_width]`)."""

    def all_gradients(
        self, given: Float32, relation: Float32, side: Side, gradients: Float32
    ) -> tuple[Float32, Float32, dict[str, Float32]]:
        """`query_gradients`, and the gradients of further variables by name."""
        return *self.query_gradients(given, relation, side, gradients), {}

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
