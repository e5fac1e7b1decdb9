"""`elastable kg predict` and `export`: the best answers to queries, and embeddings in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes
from elastable.commands.knowledge_graphs.evaluating import GRAPH, RUN, listed_entities, open_run
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option, check_options, required, setting
from elastable.process.stopping import OutputConsole

if TYPE_CHECKING:
    from elastable.replicas.knowledge_graphs.evaluation import Candidates
    from elastable.replicas.knowledge_graphs.trained import Answer, Query, TrainedGraph

__all__ = ["export_run", "predict_links"]

_UNKNOWN = "?"
_query = partial(Option, group="One query")
_file = partial(Option, group="A file of queries")


@dataclass(frozen=True, slots=True)
class _PredictOptions:
    run: Path = required(RUN)
    graph: str | None = setting(None, GRAPH)
    relation: str | None = setting(None, _query("Name of the relation."))
    head: str | None = setting(None, _query("Name of the head; asks for tails."))
    tail: str | None = setting(None, _query("Name of the tail; asks for heads."))
    queries: Path | None = setting(
        None, _file("Head, relation and tail, tab-separated, with ? for what is asked.", metavar="FILE")
    )
    output: Path | None = setting(
        None,
        _file("Write the answers to this Parquet file.", metavar="FILE.parquet", unset="print JSON, a line a query"),
    )
    top: int = setting(10, Option("Number of answers.", flags=("--top", "-k"), at_least=1))
    new: bool = setting(False, Option("Leave out triples that the graph already has."))
    among: Path | None = setting(
        None, Option("Only these entities may answer: a file with a name per line.", metavar="FILE")
    )
    of_type: str | None = setting(None, Option("Only entities of this type may answer.", metavar="TYPE"))
    as_json: bool = setting(False, AS_JSON)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.relation is None) == (self.queries is None):
            raise BadInput("give --relation with --head or --tail, or a file of --queries")
        if self.queries is not None and (self.head is not None or self.tail is not None):
            raise BadInput("--queries names heads and tails in its file; leave out --head and --tail")
        if self.output is not None and self.queries is None:
            raise BadInput("--output is for a file of --queries; one query is printed")
        if self.among is not None and self.of_type is not None:
            raise BadInput("--of-type and --among both restrict the answers; give one of them")


@takes(_PredictOptions)
def predict_links(options: _PredictOptions) -> None:
    """Answer (head, relation, ?) or (?, relation, tail)."""
    trained = open_run(options.run, options.graph)
    from elastable.replicas.knowledge_graphs.trained import LinkPredictor, Query

    if options.queries is not None:
        queries = _read(trained, options.queries)
    else:
        queries = [Query(options.relation or "", options.head, options.tail)]
    among = _candidates(trained, options)
    found = LinkPredictor(trained).answer(queries, k=options.top, new=options.new, among=among)
    if options.output is not None:
        _save(options.output, queries, found)
        typer.echo(f"answers to {len(queries):,} queries in {options.output}")
    elif options.queries is not None:
        for query, answers in zip(queries, found, strict=True):
            asked = {"head": query.head, "relation": query.relation, "tail": query.tail}
            typer.echo(json.dumps({**asked, "answers": _as_json(answers)}))
    elif options.as_json:
        typer.echo(json.dumps(_as_json(found[0])))
    else:
        OutputConsole().print(_table(queries[0], found[0]))


def _candidates(trained: TrainedGraph, options: _PredictOptions) -> Candidates | None:
    from elastable.replicas.knowledge_graphs.evaluation import Candidates

    if options.among is not None:
        return listed_entities(trained, options.among)
    if options.of_type is None:
        return None
    graph = trained.graph
    if graph.entity_types is None or graph.types is None:
        raise BadInput(
            f"{trained.source} has no entity_types.txt (entity and type, one per line), which --of-type needs"
        )
    return Candidates.of_list(graph.entities_of_type(options.of_type), len(trained.entities))


def _read(trained: TrainedGraph, file: Path) -> list[Query]:
    from elastable.replicas.knowledge_graphs.graph import line_of, read_columns
    from elastable.replicas.knowledge_graphs.trained import Query

    if _UNKNOWN in trained.entities:
        raise BadInput(
            f"an entity is named {_UNKNOWN!r}, which means the unknown end in {file}; ask by --head and --tail"
        )
    columns = [[names[code] for code in codes] for names, codes in read_columns(file)]
    found = []
    for record, (head, relation, tail) in enumerate(zip(*columns, strict=True)):
        if (head == _UNKNOWN) == (tail == _UNKNOWN):
            raise BadInput(f"{file}, line {line_of(file, record)}: head or tail must be {_UNKNOWN}, and not both")
        found.append(Query(relation, None if head == _UNKNOWN else head, None if tail == _UNKNOWN else tail))
    return found


def _save(path: Path, queries: Sequence[Query], found: Sequence[Sequence[Answer]]) -> None:
    """A row per answer: query (its number, from 0), head, relation, tail, side, rank (from 1), score."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = [
        (number, query, rank, answer)
        for number, (query, answers) in enumerate(zip(queries, found, strict=True))
        for rank, answer in enumerate(answers, start=1)
    ]
    table = pa.table(
        {
            "query": pa.array([number for number, *_ in rows], pa.int64()),
            "head": pa.array([answer.entity if query.head is None else query.head for _, query, _, answer in rows]),
            "relation": pa.array([query.relation for _, query, _, _ in rows]),
            "tail": pa.array([answer.entity if query.tail is None else query.tail for _, query, _, answer in rows]),
            "side": pa.array([query.side for _, query, _, _ in rows]),
            "rank": pa.array([rank for _, _, rank, _ in rows], pa.int64()),
            "score": pa.array([answer.score for *_, answer in rows], pa.float32()),
        }
    )
    try:
        pyarrow.parquet.write_table(table, path)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error}") from error


def _as_json(answers: Sequence[Answer]) -> list[dict[str, object]]:
    return [{"entity": answer.entity, "score": answer.score} for answer in answers]


def _table(query: Query, answers: Sequence[Answer]) -> Table:
    title = f"({query.head or _UNKNOWN}, {query.relation}, {query.tail or _UNKNOWN})"
    table = Table(title=title, title_justify="left")
    for column in ("", "entity", "score"):
        table.add_column(column, justify="left" if column == "entity" else "right")
    for rank, answer in enumerate(answers, start=1):
        table.add_row(str(rank), answer.entity, f"{answer.score:.4f}")
    return table


@dataclass(frozen=True, slots=True)
class _ExportOptions:
    run: Path = required(RUN)
    output: Path = required(Option("A new folder.", metavar="DIR"))
    format: str = required(Option("Format of the embeddings.", choices=("numpy", "parquet")))


@takes(_ExportOptions)
def export_run(options: _ExportOptions) -> None:
    """Write the embeddings for other programs."""
    trained = open_run(options.run, None)
    from elastable.replicas.knowledge_graphs.trained import export_embeddings

    for file in export_embeddings(trained, options.output, options.format):
        typer.echo(str(file))
