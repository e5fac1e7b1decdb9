"""`elastable kg evaluate`, `score`, `classify`, `predict` and `export`: what to do with a trained knowledge graph."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import typer
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.support.extras import needs
from elastable.process.quiet import import_backend
from elastable.process.stopping import OutputConsole

if TYPE_CHECKING:
    from elastable.embedding_store.contract.arrays import Int32
    from elastable.replicas.knowledge_graphs.evaluation import Candidates, TripleCandidates
    from elastable.replicas.knowledge_graphs.trained_graph import Answer, Query, TrainedGraph

RUN = Option("A run directory of `elastable kg train`.", metavar="RUN", positional=True)
GRAPH = Option("The graph, if it has moved since.", metavar="DATASET", unset="where it was when the model was trained")
_among = partial(Option, group="Candidates")


def open_run(run: Path, graph: str | None) -> TrainedGraph:
    """The best model of a run, on all cores of this process."""
    with needs("elastable kg", "replicas"):
        import_backend()
        from elastable.embedding_store.native.range_pool import RangePool, available_cores
        from elastable.replicas.knowledge_graphs.trained_graph import TrainedGraph

    return TrainedGraph(run, graph, RangePool(available_cores()))


@dataclass(frozen=True, slots=True)
class _KgEvaluateOptions:
    run: Path = required(RUN)
    graph: str | None = setting(None, GRAPH)
    split: str = setting("test", Option("Which triples to rank.", choices=("train", "valid", "test")))
    by: str | None = setting(
        None, Option("Break the metrics down.", choices=("relation", "category", "side"), unset="all queries together")
    )
    at: str = setting("1,3,10", Option("The k of each Hits@k.", metavar="K,K,..."))
    filtered: bool = setting(
        True, Option("Whether known triples of all splits compete.", flags=("--filtered/--raw",), group="Candidates")
    )
    of_type: bool = setting(
        False, _among("Rank among entities of the answer's type only (entity_types.txt).", flags=("--of-type",))
    )
    among: Path | None = setting(
        None, _among("Rank among these entities only: a file with a name per line.", metavar="FILE")
    )
    listed: Path | None = setting(
        None,
        _among(
            "Rank each answer among the entities that this file lists for its triple, as OGB's head_neg and tail_neg "
            "(docs/knowledge-graphs.md).",
            metavar="FILE.npz",
        ),
    )
    ties: str = setting("average", _among("Rank among equal scores.", choices=("average", "optimistic", "pessimistic")))
    ranks: Path | None = setting(
        None, Option("Write the rank of every query to this Parquet file.", metavar="FILE.parquet")
    )
    as_json: bool = setting(False, AS_JSON)

    def __post_init__(self) -> None:
        if self.of_type + (self.among is not None) + (self.listed is not None) > 1:
            raise BadInput("--of-type, --among and --listed all restrict the candidates; give one of them")


@takes(_KgEvaluateOptions)
def evaluate_run(options: _KgEvaluateOptions) -> None:
    """Rank the heads and tails of a split's triples with a trained model."""
    hits = _hits(options.at)
    trained = open_run(options.run, options.graph)
    from elastable.replicas.knowledge_graphs.ranking import rank_groups, save_ranks

    graph = trained.graph
    triples: Int32 = getattr(graph, options.split)
    if not len(triples):
        raise BadInput(f"{trained.source} has no {options.split} triples")
    among = _candidates(trained, options)
    ranks = trained.evaluation(filtered=options.filtered, ties=options.ties, among=among).ranks(triples)
    report: dict[str, object] = {
        "run": str(options.run),
        "split": options.split,
        "filtered": options.filtered,
        "ties": options.ties,
        "triples": len(triples),
        "metrics": ranks.metrics(hits, options.ties),
    }
    if options.by is not None:
        report["by"] = options.by
        report["groups"] = rank_groups(options.by, ranks, triples, graph.relations, graph.train, hits, options.ties)
    if options.ranks is not None:
        scores = trained.triple_scores(triples, "head"), trained.triple_scores(triples, "tail")
        about = {name: str(report[name]) for name in ("run", "split", "filtered")}
        save_ranks(options.ranks, ranks, triples, scores, graph.entities, graph.relations, about)
    if options.as_json:
        typer.echo(json.dumps(report))
    else:
        OutputConsole().print(rank_table(report, hits))


def _hits(at: str) -> tuple[int, ...]:
    words = at.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise BadInput(f"--at {at}: Hits@k needs numbers from 1, separated by commas, such as 1,3,10")
    return tuple(int(word) for word in words)


def listed_entities(trained: TrainedGraph, file: Path) -> Candidates:
    """The entities of a file, a name per line. Raises BadInput for an unknown one."""
    from elastable.replicas.knowledge_graphs.evaluation import Candidates
    from elastable.replicas.knowledge_graphs.graph.triple_files import read_columns

    names = read_columns(file, ("entity",))["entity"].unique().to_pylist()
    try:
        return Candidates.of_list(trained.entities.ids_of(names), len(trained.entities))
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from error


def _candidates(trained: TrainedGraph, options: _KgEvaluateOptions) -> Candidates | TripleCandidates | None:
    from elastable.replicas.knowledge_graphs.evaluation import Candidates, read_triple_candidates

    if options.among is not None:
        return listed_entities(trained, options.among)
    if options.listed is not None:
        return read_triple_candidates(options.listed, trained.graph)
    if not options.of_type:
        return None
    return Candidates.of_types(_entity_types(trained), len(trained.entities), trained.graph.further_types)


def _entity_types(trained: TrainedGraph) -> Int32:
    types = trained.graph.entity_types
    if types is None:
        raise BadInput(
            f"{trained.source} has no entity_types.txt (entity and type, one per line), which --of-type needs"
        )
    return types


def rank_table(report: Mapping[str, object], hits: Sequence[int]) -> Table:
    """What `kg evaluate --json` prints, as a table; `hits`: the k of its hits@k."""
    kind = "filtered" if report["filtered"] else "raw"
    table = Table(title=f"{report['triples']:,} {report['split']} triples, {kind}", title_justify="left")
    names = ["mrr", *(f"hits@{k}" for k in hits), "mean_rank"]
    table.add_column(str(report.get("by", "")), overflow="fold")  # whole names, however narrow the terminal
    for column in ("queries", *names):
        table.add_column(column, justify="right")

    def add(name: str, queries: int, metrics: Mapping[str, float], prefix: str = "") -> None:
        values = (f"{metrics[prefix + each]:.{1 if each == 'mean_rank' else 4}f}" for each in names)
        table.add_row(name, f"{queries:,}", *values)

    count, metrics = int(str(report["triples"])), report["metrics"]
    assert isinstance(metrics, dict)
    add("all", 2 * count, metrics)
    groups = report.get("groups")
    for group in groups if isinstance(groups, list) else []:
        add(group["name"], group["queries"], group["metrics"])
    return table


@dataclass(frozen=True, slots=True)
class _ScoreOptions:
    run: Path = required(RUN)
    triples: Path = required(
        Option("Triples by name: head, relation and tail, tab-separated.", metavar="FILE", positional=True)
    )
    side: str = setting(
        "tail",
        Option(
            "The query that a triple is scored as; with reciprocal relations they differ.", choices=("head", "tail")
        ),
    )


@takes(_ScoreOptions)
def score_triples(options: _ScoreOptions) -> None:
    """Score triples; higher is more plausible."""
    trained = open_run(options.run, None)
    triples = _read(trained, options.triples)
    scores = trained.triple_scores(triples, "head" if options.side == "head" else "tail")
    names = (trained.entities, trained.relations, trained.entities)
    columns = [[of[each] for each in triples[:, place].tolist()] for place, of in enumerate(names)]
    sys.stdout.writelines(
        f"{head}\t{relation}\t{tail}\t{value:.6g}\n"
        for head, relation, tail, value in zip(*columns, scores.tolist(), strict=True)
    )


@dataclass(frozen=True, slots=True)
class _ClassifyOptions:
    run: Path = required(RUN)
    graph: str | None = setting(None, GRAPH)
    valid_negatives: Path | None = setting(
        None,
        Option("False triples to choose thresholds with.", metavar="FILE", unset="valid_negatives.txt of the graph"),
    )
    test_negatives: Path | None = setting(
        None, Option("False triples to test with.", metavar="FILE", unset="test_negatives.txt of the graph")
    )
    as_json: bool = setting(False, AS_JSON)


@takes(_ClassifyOptions)
def classify_triples(options: _ClassifyOptions) -> None:
    """Tell true triples from false ones, by a threshold of each relation chosen on validation triples."""
    trained = open_run(options.run, options.graph)
    from elastable.replicas.knowledge_graphs.graph.knowledge_graph import GraphSource
    from elastable.replicas.knowledge_graphs.ranking import choose_thresholds, classification_metrics

    graph, folder = trained.graph, Path(GraphSource.parse(trained.source).place)
    labelled = []
    for true, given, name in (
        (graph.valid, options.valid_negatives, "valid_negatives"),
        (graph.test, options.test_negatives, "test_negatives"),
    ):
        file = given if given is not None else folder / f"{name}.txt"
        if given is None and not file.is_file():
            raise BadInput(
                f"{trained.source} has no {name}.txt; name a file of false triples by --{name.replace('_', '-')}"
            )
        false = _read(trained, file)
        triples = np.concatenate([true, false])
        labels = np.arange(len(triples)) < len(true)
        labelled.append((triples[:, 1], trained.triple_scores(triples), labels))
    thresholds = choose_thresholds(*labelled[0], len(trained.relations))
    relation, scores, labels = labelled[1]
    found = classification_metrics(scores >= thresholds[relation], labels)
    if options.as_json:
        by_name = dict(zip(trained.relations, thresholds.tolist(), strict=True))
        typer.echo(
            json.dumps({**found, "thresholds": {name: value for name, value in by_name.items() if np.isfinite(value)}})
        )
        return
    table = Table(title=f"{found['triples']:,} triples, {int(labels.sum()):,} of them true", title_justify="left")
    for column in ("accuracy", "precision", "recall", "f1"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{found[name]:.4f}" for name in ("accuracy", "precision", "recall", "f1")))
    OutputConsole().print(table)


def _read(trained: TrainedGraph, file: Path) -> Int32:
    """Triples of a file by name; unknown names are refused with similar ones."""
    from elastable.replicas.knowledge_graphs.graph.triple_files import numbered, read_columns

    columns = [numbered([column]) for column in read_columns(file).columns]
    kinds = (trained.entities, trained.relations, trained.entities)
    try:
        ids = [of.ids_of(names)[codes[:, 0]] for of, (names, codes) in zip(kinds, columns, strict=True)]
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from error
    return np.stack(ids, axis=1).astype(np.int32)


# The best answers to queries, and embeddings in files


_UNKNOWN = "?"
_query = partial(Option, group="One query")


@dataclass(frozen=True, slots=True)
class _KgPredictOptions:
    run: Path = required(RUN)
    graph: str | None = setting(None, GRAPH)
    relation: str | None = setting(None, _query("Name of the relation."))
    head: str | None = setting(None, _query("Name of the head; asks for tails."))
    tail: str | None = setting(None, _query("Name of the tail; asks for heads."))
    queries: Path | None = setting(
        None,
        Option(
            "Queries, answered in JSON: head, relation and tail, tab-separated, ? for what is asked.", metavar="FILE"
        ),
    )
    top: int = setting(10, Option("Number of answers.", flags=("--top", "-k"), at_least=1))
    new: bool = setting(False, Option("Leave out triples that the graph already has."))
    among: Path | None = setting(
        None, Option("Only these entities may answer: a file with a name per line.", metavar="FILE")
    )
    of_type: str | None = setting(None, Option("Only entities of this type may answer.", metavar="TYPE"))
    as_json: bool = setting(False, AS_JSON)

    def __post_init__(self) -> None:
        if (self.relation is None) == (self.queries is None):
            raise BadInput("give --relation with --head or --tail, or a file of --queries")
        if self.queries is not None and (self.head is not None or self.tail is not None):
            raise BadInput("--queries names heads and tails in its file; leave out --head and --tail")
        if self.among is not None and self.of_type is not None:
            raise BadInput("--of-type and --among both restrict the answers; give one of them")


@takes(_KgPredictOptions)
def predict_links(options: _KgPredictOptions) -> None:
    """Answer (head, relation, ?) or (?, relation, tail)."""
    trained = open_run(options.run, options.graph)
    from elastable.replicas.knowledge_graphs.trained_graph import Query

    if options.queries is not None:
        queries = _read_queries(trained, options.queries)
    else:
        queries = [Query(options.relation or "", options.head, options.tail)]
    among = _entities_among(trained, options)
    found = trained.answer(queries, k=options.top, new=options.new, among=among)
    if options.queries is not None:
        for query, answers in zip(queries, found, strict=True):
            asked = {"head": query.head, "relation": query.relation, "tail": query.tail}
            typer.echo(json.dumps({**asked, "answers": [asdict(answer) for answer in answers]}))
    elif options.as_json:
        typer.echo(json.dumps([asdict(answer) for answer in found[0]]))
    else:
        OutputConsole().print(_table(queries[0], found[0]))


def _entities_among(trained: TrainedGraph, options: _KgPredictOptions) -> Candidates | None:
    from elastable.replicas.knowledge_graphs.evaluation import Candidates

    if options.among is not None:
        return listed_entities(trained, options.among)
    if options.of_type is None:
        return None
    _entity_types(trained)
    return Candidates.of_list(trained.graph.entities_of_type(options.of_type), len(trained.entities))


def _read_queries(trained: TrainedGraph, file: Path) -> list[Query]:
    from elastable.replicas.knowledge_graphs.graph.triple_files import line_of, read_columns
    from elastable.replicas.knowledge_graphs.trained_graph import Query

    if _UNKNOWN in trained.entities:
        raise BadInput(
            f"an entity is named {_UNKNOWN!r}, which means the unknown end in {file}; ask by --head and --tail"
        )
    columns = [column.to_pylist() for column in read_columns(file).columns]
    found = []
    for record, (head, relation, tail) in enumerate(zip(*columns, strict=True)):
        if (head == _UNKNOWN) == (tail == _UNKNOWN):
            raise BadInput(f"{file}, line {line_of(file, record)}: head or tail must be {_UNKNOWN}, and not both")
        found.append(Query(relation, None if head == _UNKNOWN else head, None if tail == _UNKNOWN else tail))
    return found


def _table(query: Query, answers: Sequence[Answer]) -> Table:
    title = f"({query.head or _UNKNOWN}, {query.relation}, {query.tail or _UNKNOWN})"
    table = Table(title=title, title_justify="left")
    for column in ("", "entity", "score"):
        table.add_column(column, justify="left" if column == "entity" else "right")
    for rank, answer in enumerate(answers, start=1):
        table.add_row(str(rank), answer.entity, f"{answer.score:.4f}")
    return table


@dataclass(frozen=True, slots=True)
class _KgExportOptions:
    run: Path = required(RUN)
    output: Path = required(Option("A new folder.", metavar="DIR"))
    format: str = required(Option("Format of the embeddings.", choices=("numpy", "parquet")))


@takes(_KgExportOptions)
def export_run(options: _KgExportOptions) -> None:
    """Write the embeddings for other programs."""
    trained = open_run(options.run, None)
    from elastable.replicas.knowledge_graphs.trained_graph import export_embeddings

    for file in export_embeddings(trained, options.output, options.format):
        typer.echo(str(file))
