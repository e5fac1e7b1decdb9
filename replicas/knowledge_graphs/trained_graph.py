"""A trained model of a run directory, loaded once: its scores, its answers by names, and its embeddings in files."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from elastable.embedding_store.contract.arrays import Float32, Int32
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.groups.thread_group import alone
from elastable.replicas.knowledge_graphs.evaluation import (
    AllScores,
    Candidates,
    Evaluation,
    TripleCandidates,
    query_batches,
)
from elastable.replicas.knowledge_graphs.graph.batch import SIDES, Side
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import KnowledgeGraph, load_graph
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, Sharding, checked_triples
from elastable.replicas.knowledge_graphs.graph.triple_files import Names, inverse_names
from elastable.replicas.knowledge_graphs.graph_run import GraphCheckpoints
from elastable.replicas.knowledge_graphs.graph_trainer import ShardedModel

_TRIPLES = 1 << 14  # scored at once
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


class TrainedGraph:
    """A run's best model by validation, in the memory of this process.

    Args:
        run: A run directory of `elastable kg train`.
        source: The graph, where it has moved since; None: where it was when the model was trained.
        pool: Threads to compute with; they do not affect results.

    Attributes:
        entities, relations: Names by id; inverse relations have ids from `len(relations)` on, and no names.
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
        self.relations = Names(
            list(Names.load(run / "relations.txt"))[: int(str(found.graph["relations"]))], "relation"
        )
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
        return self.model.known(self.graph.train, self.graph.valid, self.graph.test)

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
        known = (self.graph.train, self.graph.valid, self.graph.test) if filtered else ()
        return Evaluation(self.model, *known, ties=ties, among=among, pool=self.pool)

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
        given = checked_triples(triples, len(self.entities), len(self.relations))
        asked, _ = self.model.asked(given, side)
        found = np.empty(len(asked), np.float32)
        for first in range(0, len(asked), _TRIPLES):
            some = asked[first : first + _TRIPLES]
            heads, tails = self.embeddings(some[:, 0]), self.embeddings(some[:, 2])
            found[first : first + _TRIPLES] = self.model.score.score_triples(
                heads, self.model.relations[some[:, 1]], tails
            )
        return found

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
            BadInput: an unknown name (with similar ones), or k below 1; with `new`, the graph has moved or changed.
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
        head, tail = (-1 if name is None else self.entities.id_of(name) for name in (query.head, query.tail))
        return head, self.relations.id_of(query.relation), tail

    def _side(self, triples: Int32, side: Side, k: int, new: bool, among: Candidates | None) -> list[list[Answer]]:
        asked, of = self.model.asked(triples, side)
        batches = query_batches(asked, self.model.sharding, of, min(_QUERIES, len(asked)), 0)
        known, most = self.known if new else None, min(k, len(self.entities))
        found: list[list[Answer]] = [[] for _ in triples]
        for queries in batches:
            best, scores = self.all_scores.top(queries, most, known, among or Candidates())
            for place in np.flatnonzero(queries.mask):
                pairs = zip(best[place].tolist(), scores[place].tolist(), strict=True)
                answers = [Answer(self.entities[entity], score) for entity, score in pairs if score > -np.inf]
                found[int(queries.triple[place])] = answers
        return found


FORMATS = ("numpy", "parquet")


def export_embeddings(trained: TrainedGraph, folder: Path, kind: str) -> list[Path]:
    """Writes a model into a new folder, in which a file `model.json` says what the columns of rows are.

    Entities have the order of their ids; relations too, with inverse ones behind all others, named `NAME (inverse)`.

    Args:
        folder: Must not exist, or be empty.
        kind: One of `FORMATS`.

    Raises:
        BadInput: an unknown format, or a folder that holds something or cannot be written; nothing is left.
    """
    if kind not in FORMATS:
        raise BadInput(f"export as {kind!r}: known are {', '.join(FORMATS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists; export writes a new folder")
    names = {"entities": list(trained.entities), "relations": list(trained.relations)}
    if trained.settings.reciprocal:
        names["relations"] += inverse_names(names["relations"])
    draft = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for table, rows in (("entities", trained.embeddings()), ("relations", trained.model.relations)):
            _save_table(draft / table, kind, names[table], rows)
        for name, value in trained.model.score.dense.items():
            np.save(draft / f"{name}.npy", value)
        about = {"format": kind, "settings": trained.settings.as_json(), **_about(trained)}
        (draft / "model.json").write_text(json.dumps(about, indent=2) + "\n")
        draft.replace(folder)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(folder.iterdir())


def _about(trained: TrainedGraph) -> dict[str, object]:
    score = trained.model.score
    return {
        "model": score.name,
        "entities": len(trained.entities),
        "relations": len(trained.relations),
        "inverse_relations": trained.settings.reciprocal,
        "rows": {
            kind: [{"name": part.name, "columns": [part.first, part.last], "meaning": part.meaning} for part in parts]
            for kind, parts in score.layout().items()
        },
        "further_variables": {name: list(value.shape) for name, value in score.dense.items()},
    }


def _save_table(file: Path, kind: str, names: Sequence[str], rows: Float32) -> None:
    if kind == "numpy":
        np.save(f"{file}.npy", rows)
        Path(f"{file}.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        return
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    columns = {"id": pa.array(np.arange(len(rows))), "name": pa.array(names), "embedding": embedding}
    pyarrow.parquet.write_table(pa.table(columns), f"{file}.parquet")
