"""`elastable kg neighbors` and `export`: what a trained model of a knowledge graph is used for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes
from elastable.commands.knowledge_graphs.evaluating import RUN, open_run
from elastable.embedding_store.option import Option, required, setting
from elastable.process.stopping import OutputConsole

__all__ = ["export_run", "show_neighbors"]


@dataclass(frozen=True, slots=True)
class _NeighborOptions:
    run: Path = required(RUN)
    entity: str = required(Option("Name of the entity.", metavar="ENTITY", positional=True))
    top: int = setting(10, Option("Number of neighbours.", flags=("--top", "-k"), at_least=1))
    measure: str = setting("cosine", Option("Similarity.", choices=("cosine", "euclidean", "dot")))
    as_json: bool = setting(False, AS_JSON)


@takes(_NeighborOptions)
def show_neighbors(options: _NeighborOptions) -> None:
    """Show the nearest entities to an entity, by their embeddings."""
    trained = open_run(options.run, None)
    from elastable.replicas.knowledge_graphs.trained.neighbors import nearest_neighbors

    near = nearest_neighbors(trained, [trained.entities.id_of(options.entity)], options.top, options.measure)
    pairs = list(zip(near.entities[0].tolist(), near.similarities[0].tolist(), strict=True))
    if options.as_json:
        typer.echo(json.dumps([{"entity": trained.entities[each], "similarity": value} for each, value in pairs]))
        return
    table = Table(title=f"nearest to {options.entity}", title_justify="left")
    for column in ("", "entity", options.measure):
        table.add_column(column, justify="left" if column == "entity" else "right")
    for rank, (each, value) in enumerate(pairs, start=1):
        table.add_row(str(rank), trained.entities[each], f"{value:.4f}")
    OutputConsole().print(table)


@dataclass(frozen=True, slots=True)
class _ExportOptions:
    run: Path = required(RUN)
    output: Path = required(Option("A new folder.", metavar="DIR"))
    format: str = required(Option("Format of the embeddings.", choices=("numpy", "parquet", "word2vec", "torch")))
    spaces: str | None = setting(
        None, Option("Replaces spaces in names, for word2vec.", metavar="TEXT", unset="such names are refused")
    )


@takes(_ExportOptions)
def export_run(options: _ExportOptions) -> None:
    """Write the embeddings for other programs."""
    trained = open_run(options.run, None)
    from elastable.replicas.knowledge_graphs.trained.export import export_embeddings

    for file in export_embeddings(trained, options.output, options.format, options.spaces):
        typer.echo(str(file))
