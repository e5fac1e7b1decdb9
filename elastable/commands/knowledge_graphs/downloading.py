"""`elastable kg download`: a published graph as a folder to train on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from elastable.commands.command_line import takes
from elastable.embedding_store.option import Option, required, setting
from elastable.replicas.knowledge_graphs.graph.downloads.published import PUBLISHED_GRAPHS

__all__ = ["download_published"]


@dataclass(frozen=True, slots=True)
class _DownloadOptions:
    graph: str = required(Option(f"One of {', '.join(PUBLISHED_GRAPHS)}.", metavar="GRAPH", positional=True))
    folder: Path = required(Option("A new folder.", metavar="FOLDER", positional=True))
    url: str | None = setting(
        None, Option("A mirror: a folder with the same files.", metavar="URL", unset="where the graph was published")
    )
    checksums: Path | None = setting(
        None, Option("Checksums that the files must have: the SHA256SUMS of an earlier download.", metavar="FILE")
    )


@takes(_DownloadOptions)
def download_published(options: _DownloadOptions) -> None:
    """Download a published graph, check it, and write it as a folder."""
    from elastable.replicas.knowledge_graphs.graph.downloads.download import download_graph, read_checksums
    from elastable.replicas.knowledge_graphs.graph.downloads.published import published_graph

    graph = published_graph(options.graph)
    known = None if options.checksums is None else read_checksums(options.checksums)
    download_graph(graph, options.folder, url=options.url, checksums=known, tell=typer.echo)
    typer.echo(f"{graph.name} in {options.folder}: {graph.entities:,} entities, {graph.train:,} triples; {graph.terms}")
