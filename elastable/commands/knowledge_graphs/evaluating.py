"""`elastable kg evaluate`, `score` and `classify`: how good a trained model of a knowledge graph is."""

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
from elastable.embedding_store.option import Option, check_options, required, setting
from elastable.embedding_store.support.extras import needs
from elastable.process.quiet import import_tensorflow
from elastable.process.stopping import OutputConsole

if TYPE_CHECKING:
    from elastable.embedding_store.contract.arrays import Int32
    from elastable.replicas.knowledge_graphs.evaluation import Candidates, TripleCandidates
    from elastable.replicas.knowledge_graphs.trained import TrainedGraph

__all__ = [
    "GRAPH",
    "RUN",
    "classify_triples",
    "evaluate_run",
    "listed_entities",
    "open_run",
    "rank_table",
    "score_triples",
]

RUN = Option("A run directory of `elastable kg train`.", metavar="RUN", positional=True)
GRAPH = Option("The graph, if it has moved since.", metavar="DATASET", unset="where it was when the model was trained")
_among = partial(Option, group="Candidates")


def open_run(run: Path, graph: str | None) -> TrainedGraph:
    """The best model of a run, on all cores of this process."""
    with needs("elastable kg", "replicas"):
        import_tensorflow()
        from elastable.embedding_store.native.range_pool import RangePool, available_cores
        from elastable.replicas.knowledge_graphs.trained import TrainedGraph

    return TrainedGraph(run, graph, RangePool(available_cores()))


@dataclass(frozen=True, slots=True)
class _EvaluateOptions:
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
            "Rank each answer among the entities that this file lists for its triple: OGB's head_neg and tail_neg, or "
            "names (docs/knowledge-graph-models.md).",
            metavar="FILE.npz|FILE.parquet",
        ),
    )
    ties: str = setting(
        "average",
        _among("Rank among equal scores.", choices=("average", "optimistic", "pessimistic")),
    )
    ranks: Path | None = setting(
        None, Option("Write the rank of every query to this Parquet file.", metavar="FILE.parquet")
    )
    as_json: bool = setting(False, AS_JSON)

    def __post_init__(self) -> None:
        check_options(self)
        if self.of_type + (self.among is not None) + (self.listed is not None) > 1:
            raise BadInput("--of-type, --among and --listed all restrict the candidates; give one of them")


@takes(_EvaluateOptions)
def evaluate_run(options: _EvaluateOptions) -> None:
    """Rank the heads and tails of a split's triples with a trained model."""
    hits = _hits(options.at)
    trained = open_run(options.run, options.graph)
    from elastable.replicas.knowledge_graphs.trained import rank_groups, save_ranks

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
        groups = rank_groups(options.by, ranks, triples, graph.relations, graph.train, hits, options.ties)
        report["by"] = options.by
        report["groups"] = [asdict(group) for group in groups]
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
    from elastable.replicas.knowledge_graphs.graph import read_columns

    names = read_columns(file, ("entity",))[0][0]
    try:
        return Candidates.of_list(trained.entities.ids_of(names), len(trained.entities))
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from error


def _candidates(trained: TrainedGraph, options: _EvaluateOptions) -> Candidates | TripleCandidates | None:
    from elastable.replicas.knowledge_graphs.evaluation import Candidates
    from elastable.replicas.knowledge_graphs.trained import read_triple_candidates

    if options.among is not None:
        return listed_entities(trained, options.among)
    if options.listed is not None:
        return read_triple_candidates(options.listed, trained.graph)
    if not options.of_type:
        return None
    types = trained.graph.entity_types
    if types is None:
        raise BadInput(
            f"{trained.source} has no entity_types.txt (entity and type, one per line), which --of-type needs"
        )
    return Candidates.of_types(types, len(trained.entities), trained.graph.further_types)


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
    output: Path | None = setting(
        None, Option("Write the scores to this Parquet file.", metavar="FILE.parquet", unset="print them")
    )


@takes(_ScoreOptions)
def score_triples(options: _ScoreOptions) -> None:
    """Score triples; higher is more plausible."""
    trained = open_run(options.run, None)
    import pyarrow as pa
    import pyarrow.parquet

    triples = _read(trained, options.triples)
    scores = trained.triple_scores(triples, "head" if options.side == "head" else "tail")
    names = (trained.entities, trained.relations, trained.entities)
    columns = [[of[each] for each in triples[:, place].tolist()] for place, of in enumerate(names)]
    if options.output is None:
        sys.stdout.writelines(
            f"{head}\t{relation}\t{tail}\t{value:.6g}\n"
            for head, relation, tail, value in zip(*columns, scores.tolist(), strict=True)
        )
        return
    table = pa.table({**dict(zip(("head", "relation", "tail"), columns, strict=True)), "score": scores})
    try:
        pyarrow.parquet.write_table(table, options.output)
    except OSError as error:
        raise BadInput(f"{options.output} cannot be written: {error}") from error
    typer.echo(f"{len(scores):,} scores in {options.output}")


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
    from elastable.replicas.knowledge_graphs.evaluation import ClassificationMetrics, Thresholds
    from elastable.replicas.knowledge_graphs.graph import GraphSource

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
    thresholds = Thresholds.choose(*labelled[0], len(trained.relations))
    relation, scores, labels = labelled[1]
    predicted = thresholds.predict(relation, scores)
    found = asdict(ClassificationMetrics.of(predicted, labels))
    if options.as_json:
        by_name = dict(zip(trained.relations, thresholds.of_relation.tolist(), strict=True))
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
    from elastable.replicas.knowledge_graphs.graph import read_columns

    columns = read_columns(file)
    kinds = (trained.entities, trained.relations, trained.entities)
    try:
        ids = [of.ids_of(names)[codes] for of, (names, codes) in zip(kinds, columns, strict=True)]
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from error
    return np.stack(ids, axis=1).astype(np.int32)
