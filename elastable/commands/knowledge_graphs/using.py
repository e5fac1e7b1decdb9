"""`elastable kg export`: the embeddings of a trained model in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from elastable.commands.command_line import takes
from elastable.commands.knowledge_graphs.evaluating import RUN, open_run
from elastable.embedding_store.option import Option, required

__all__ = ["export_run"]


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
