"""`elastable kg neighbors`, `export` and `serve`: what a trained model of a knowledge graph is used for."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes
from elastable.commands.knowledge_graphs.evaluating import GRAPH, RUN, open_run
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.support.address import Address
from elastable.process.stopping import OutputConsole

__all__ = ["export_run", "serve_run", "show_neighbors"]


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


@dataclass(frozen=True, slots=True)
class _ServeOptions:
    run: Path = required(RUN)
    graph: str | None = setting(None, GRAPH)
    listen: str = setting("127.0.0.1:8080", Option("Address to serve HTTP at.", metavar="HOST:PORT"))
    insecure: bool = setting(False, Option("Serve others than this host without TLS and tokens."))


@takes(_ServeOptions)
def serve_run(options: _ServeOptions) -> None:
    """Answer batches of JSON queries over HTTP, with one loaded model."""
    from elastable.embedding_store.wire.access.credentials import Credentials

    address, credentials = Address.parse(options.listen), Credentials.from_environment()
    trained = open_run(options.run, options.graph)
    from elastable.commands.knowledge_graphs.query_server import QueryServer
    from elastable.replicas.knowledge_graphs.trained.link_predictor import LinkPredictor
    from elastable.replicas.knowledge_graphs.trained.query_service import QueryService

    service = QueryService(LinkPredictor(trained))
    ended = threading.Event()
    with QueryServer(service, address, credentials, options.insecure) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        scheme = "http" if credentials.certificate is None else "https"
        typer.echo(f"{trained.settings.model} of {options.run} at {server.address}, {scheme}")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        server.shutdown()
