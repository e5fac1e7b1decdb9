"""The best model of a run directory, loaded once, with the names of its entities and relations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.groups.thread_group import alone
from elastable.replicas.knowledge_graphs.evaluation.all_scores import AllScores
from elastable.replicas.knowledge_graphs.evaluation.candidates import Candidates
from elastable.replicas.knowledge_graphs.evaluation.evaluation import Evaluation, as_asked
from elastable.replicas.knowledge_graphs.evaluation.triple_candidates import TripleCandidates
from elastable.replicas.knowledge_graphs.graph import (
    KnowledgeGraph,
    KnownTriples,
    Names,
    Sharding,
    Side,
    checked_triples,
    load_graph,
    with_inverses,
)
from elastable.replicas.knowledge_graphs.model import ShardedModel
from elastable.replicas.knowledge_graphs.training.graph_checkpoints import GraphCheckpoints

__all__ = ["TrainedGraph"]

_TRIPLES = 1 << 14  # scored at once


class TrainedGraph:
    """A run's best model by validation, in the memory of this process.

    Args:
        run: A run directory of `elastable kg train`.
        source: The graph, where it has moved since; None: where it was when the model was trained.
        pool: Threads to compute with; they do not affect results.

    Attributes:
        entities, relations: Names by id; inverse relations have ids from `len(relations)` on, and no names.
        settings: The run's settings.
        model: All entities in one shard; not for concurrent use.

    Raises:
        BadInput: there is no such run, or it has no checkpoint.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, run: Path, source: str | None = None, pool: RangePool = SERIAL) -> None:
        if not (run / "entities.txt").is_file():
            raise BadInput(f"{run} is not a run directory of `elastable kg train`: it has no entities.txt")
        found = GraphCheckpoints(run / "checkpoints").best()
        self.entities = Names.load(run / "entities.txt")
        self.relations = Names(list(Names.load(run / "relations.txt"))[: _relations(found.graph)], "relation")
        self.settings, self.pool = found.settings, pool
        self.source = str(found.graph["source"]) if source is None else source
        sharding = Sharding.create(len(self.entities), 1, seed=self.settings.seed)
        relations = (1 + self.settings.reciprocal) * len(self.relations)
        self.model = ShardedModel(alone(), self.settings, sharding, relations)
        self.model.restore(found.state)
        self.all_scores = AllScores(self.model, pool=pool)

    @cached_property
    def graph(self) -> KnowledgeGraph:
        """The graph that the model was trained on, read when first asked for. Raises BadInput if it has changed."""
        graph = load_graph(self.source)
        if list(graph.entities) != list(self.entities) or list(graph.relations) != list(self.relations):
            raise BadInput(f"the graph in {self.source} is not the one that the run was trained on: its names differ")
        return graph

    @cached_property
    def known(self) -> KnownTriples:
        """All triples of the graph, in all splits, with inverses if the model has them."""
        graph = self.graph
        every = np.concatenate([graph.train, graph.valid, graph.test])
        if self.settings.reciprocal:
            every = with_inverses(every, len(self.relations))
        return KnownTriples.create(len(self.entities), len(self.model.relations), every)

    def embeddings(self, entities: npt.ArrayLike | None = None) -> Float32:
        """float32 `[k, entity_width]`: rows of these entities (int `[k]`, global ids); None: of all."""
        row_of = self.model.sharding.row_of
        rows: Float32 = self.model.entities[row_of if entities is None else row_of[np.asarray(entities)]]
        return rows

    def evaluation(
        self, *, filtered: bool = True, ties: str = "average", among: Candidates | TripleCandidates | None = None
    ) -> Evaluation:
        """Ranks triples with this model.

        Args:
            filtered: Known triples of all splits do not compete.
            ties, among: As of `Evaluation`.
        """
        graph = self.graph
        known = (graph.train, graph.valid, graph.test) if filtered else ()
        count = len(self.relations)
        reciprocal = self.settings.reciprocal
        return Evaluation(self.model, reciprocal, count, *known, ties=ties, among=among, pool=self.pool)

    def triple_scores(self, triples: npt.ArrayLike, side: Side = "tail") -> Float32:
        """Scores of triples; higher is more plausible.

        Args:
            triples: int `[N, 3]`.
            side: The end that the model is asked for: with reciprocal relations, the head and the tail query of a
                triple have different scores; without, the same up to rounding.

        Returns:
            float32 `[N]`.

        Raises:
            BadInput, IdOutOfRange: malformed triples.
        """
        given = checked_triples(triples, len(self.entities))
        if given.size and given[:, 1].max() >= len(self.relations):
            raise BadInput(f"relation {given[:, 1].max()} is not one of {len(self.relations)}")
        asked, _ = as_asked(given, side, len(self.relations), self.settings.reciprocal)
        found = np.empty(len(asked), np.float32)
        for first in range(0, len(asked), _TRIPLES):
            some = asked[first : first + _TRIPLES]
            heads, tails = self.embeddings(some[:, 0]), self.embeddings(some[:, 2])
            found[first : first + _TRIPLES] = self.model.score.score_triples(
                heads, self.model.relations[some[:, 1]], tails
            )
        return found


def _relations(graph: Mapping[str, object]) -> int:
    return int(str(graph["relations"]))
