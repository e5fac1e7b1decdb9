"""Link prediction by names, in batches, with a trained knowledge-graph model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Int32
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.evaluation.candidates import Candidates
from elastable.replicas.knowledge_graphs.evaluation.evaluation import as_asked
from elastable.replicas.knowledge_graphs.evaluation.query_batches import QueryBatches
from elastable.replicas.knowledge_graphs.graph import SIDES, Side
from elastable.replicas.knowledge_graphs.trained.trained_graph import TrainedGraph

__all__ = ["Answer", "LinkPredictor", "Query"]

_QUERIES = 256  # scored together


@dataclass(frozen=True, slots=True)
class Query:
    """(head, relation, ?) or (?, relation, tail), by names.

    Raises:
        BadInput: not exactly one of head and tail.
    """

    relation: str
    head: str | None = None
    tail: str | None = None

    def __post_init__(self) -> None:
        if (self.head is None) == (self.tail is None):
            given = "neither" if self.head is None else f"head {self.head!r} and tail {self.tail!r}"
            raise BadInput(f"give a head to query tails, or a tail to query heads; got {given}")

    @property
    def side(self) -> Side:
        """The queried end."""
        return "head" if self.head is None else "tail"


@dataclass(frozen=True, slots=True)
class Answer:
    """An entity's name, and the score of the triple with it; higher is more plausible."""

    entity: str
    score: float


class LinkPredictor:
    """The best model of a run directory of `elastable kg train`, loaded once. Not for concurrent use.

    Args:
        run: The run directory, or its model if that is loaded already.
        source, pool: As of `TrainedGraph`, which they load.

    Attributes:
        trained: The model.

    Raises:
        BadInput: there is no such run, or it has no checkpoint.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, run: Path | TrainedGraph, source: str | None = None, pool: RangePool = SERIAL) -> None:
        self.trained = run if isinstance(run, TrainedGraph) else TrainedGraph(run, source, pool)

    def answers(
        self, relation: str, *, head: str | None = None, tail: str | None = None, k: int = 10, new: bool = False
    ) -> list[Answer]:
        """The answers to one query; see `answer`."""
        return self.answer([Query(relation, head, tail)], k=k, new=new)[0]

    def answer(
        self, queries: Sequence[Query], *, k: int = 10, new: bool = False, among: Candidates | None = None
    ) -> list[list[Answer]]:
        """The best answers to each query, best first.

        Args:
            queries: Any number; those for one end are scored together.
            k: Number of answers; fewer if there are not as many.
            new: Leave out answers that are in the graph.
            among: The entities that may answer; all by default.

        Raises:
            BadInput: an unknown name (with similar ones), or k below 1; with `new`, the
                graph has moved or changed.
        """
        if k < 1:
            raise BadInput(f"the best {k} answers: ask for at least 1")
        triples = np.array([self._ids(query) for query in queries], np.int32).reshape(-1, 3)
        found: list[list[Answer]] = [[] for _ in queries]
        for side in SIDES:
            mine = np.array([place for place, query in enumerate(queries) if query.side == side], np.int64)
            if len(mine):
                for place, answers in zip(mine, self._side(triples[mine], side, k, new, among), strict=True):
                    found[place] = answers
        return found

    def _ids(self, query: Query) -> tuple[int, int, int]:
        entities = self.trained.entities
        head, tail = (-1 if name is None else entities.id_of(name) for name in (query.head, query.tail))
        return head, self.trained.relations.id_of(query.relation), tail

    def _side(self, triples: Int32, side: Side, k: int, new: bool, among: Candidates | None) -> list[list[Answer]]:
        trained = self.trained
        asked, of = as_asked(triples, side, len(trained.relations), trained.settings.reciprocal)
        batches = QueryBatches(asked, trained.model.sharding, of, min(_QUERIES, len(asked)))
        known, most = trained.known if new else None, min(k, len(trained.entities))
        found: list[list[Answer]] = [[] for _ in triples]
        for index in range(batches.batches):
            queries = batches.batch(index, 0)
            best = trained.all_scores.top(queries, most, known, among or Candidates())
            for place in np.flatnonzero(queries.mask):
                pairs = zip(best.entities[place].tolist(), best.scores[place].tolist(), strict=True)
                answers = [Answer(trained.entities[entity], score) for entity, score in pairs if score > -np.inf]
                found[int(queries.triple[place])] = answers
        return found
