"""Link prediction by names, with a trained knowledge-graph model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elastable.embedding_store.errors import BadInput
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.evaluation.all_scores import AllScores
from elastable.replicas.knowledge_graphs.evaluation.evaluation import as_asked
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph
from elastable.replicas.knowledge_graphs.graph.known_triples import KnownTriples
from elastable.replicas.knowledge_graphs.graph.names import Names
from elastable.replicas.knowledge_graphs.graph.partition import with_inverses
from elastable.replicas.knowledge_graphs.graph.sharding import Sharding
from elastable.replicas.knowledge_graphs.model import ShardedModel
from elastable.replicas.knowledge_graphs.sampling.queries import QueryBatches
from elastable.replicas.knowledge_graphs.training.graph_checkpoints import GraphCheckpoint, GraphCheckpoints

__all__ = ["Answer", "LinkPredictor"]


@dataclass(frozen=True, slots=True)
class Answer:
    """An entity's name, and the score of the triple with it; higher is more plausible."""

    entity: str
    score: float


class LinkPredictor:
    """The best model of a run directory of `elastable kg train`.

    Raises:
        BadInput: there is no such run, or it has no checkpoint.
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, run: Path) -> None:
        if not (run / "entities.txt").is_file():
            raise BadInput(f"{run} is not a run directory of `elastable kg train`: it has no entities.txt")
        self.entities = Names.load(run / "entities.txt")
        self.relations = Names.load(run / "relations.txt", "relation")
        self._found: GraphCheckpoint = GraphCheckpoints(run / "checkpoints").best()

    def answers(
        self, relation: str, *, head: str | None = None, tail: str | None = None, k: int = 10, new: bool = False
    ) -> list[Answer]:
        """The best answers to (head, relation, ?) or (?, relation, tail), best first.

        Args:
            relation: Name of the relation.
            head: Name of the head; None: the query is for heads.
            tail: Name of the tail; None: the query is for tails.
            k: Number of answers.
            new: Leave out answers that are in the graph.

        Raises:
            BadInput: not exactly one of head and tail, an unknown name (with similar
                ones), or k out of range; with `new`, the graph has moved or changed.
        """
        if (head is None) == (tail is None):
            raise BadInput("give a head to query tails, or a tail to query heads; got " + _given_text(head, tail))
        which = self.relations.id_of(relation)
        if head is not None:
            side, triple = "tail", [self.entities.id_of(head), which, -1]
        else:
            side, triple = "head", [-1, which, self.entities.id_of(tail or "")]
        settings = self._found.settings
        known = self._known() if new else None
        asked, of = as_asked(
            np.array([triple], np.int32), "tail" if side == "tail" else "head", len(self.relations), settings.reciprocal
        )

        def work(group: ReplicaGroup) -> list[Answer]:
            sharding = Sharding.create(len(self.entities), 1, seed=settings.seed)
            model = ShardedModel(group, settings, sharding, (1 + settings.reciprocal) * len(self.relations))
            model.restore(self._found.state)
            best = AllScores(model).top(QueryBatches(asked, sharding, of, 1).batch(0, 0), k, known)
            pairs = zip(best.entities[0], best.scores[0], strict=True)
            return [Answer(self.entities[int(entity)], float(score)) for entity, score in pairs if score > -np.inf]

        return run_threads(1, work)[0]

    def _known(self) -> KnownTriples:
        graph, reciprocal = load_graph(str(self._found.graph["source"])), self._found.settings.reciprocal
        relations = len(self.relations)
        if list(graph.entities) != list(self.entities) or list(graph.relations) != list(self.relations):
            raise BadInput(f"the graph in {self._found.graph['source']} is not the one that the run was trained on")
        every = np.concatenate([graph.train, graph.valid, graph.test])
        if reciprocal:
            every = with_inverses(every, relations)
        return KnownTriples.create(len(self.entities), (1 + reciprocal) * relations, every)


def _given_text(head: str | None, tail: str | None) -> str:
    return "neither" if head is None else f"head {head!r} and tail {tail!r}"
