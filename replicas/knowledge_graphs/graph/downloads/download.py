"""Downloads a published graph into a new folder; nothing is left where a file is not what it should be."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.downloads.fetch import Checksum, fetch, require_safe_url
from elastable.replicas.knowledge_graphs.graph.downloads.published import PublishedGraph
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph

__all__ = ["CHECKSUMS", "download_graph", "read_checksums"]

CHECKSUMS = "SHA256SUMS"
"""The file of the folder that has the checksums of all others, as `sha256sum` writes and checks it."""

_LONGEST_CHECKSUMS = 1 << 20


def download_graph(
    graph: PublishedGraph,
    folder: Path,
    *,
    url: str | None = None,
    checksums: Mapping[str, Checksum] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Fetches the files of a graph, checks them, and writes them with `SHA256SUMS` into a new folder.

    Every file is compared with its published checksum and with `checksums`; then the graph is read, and its numbers of
    entities, relations and triples are compared with those of its paper.

    Args:
        graph: One of `PUBLISHED_GRAPHS`.
        folder: Must not exist.
        url: A mirror: a folder with the same files; None: where they were published.
        checksums: By file name, such as those of an earlier download (`read_checksums`).
        tell: Called with a line for people after each file.

    Raises:
        BadInput: the folder exists or cannot be written, or a file or the graph is not what it should be.
        Unavailable: a file cannot be fetched.
    """
    if folder.exists():
        raise BadInput(f"{folder} exists; a graph is downloaded into a new folder")
    base = graph.url if url is None else url.removesuffix("/") + "/"
    require_safe_url(base)
    files = {}
    for file in graph.files:
        files[file.name] = fetch(base + file.name, file.most_bytes, file.checksum)
        known = (checksums or {}).get(file.name)
        if known is not None:
            known.require(files[file.name], base + file.name)
        checked = (
            "published checksum" if file.checksum else "given checksum" if known else "no checksum to compare with"
        )
        tell(f"{file.name}: {len(files[file.name]):,} bytes, {checked}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as home:
            inside = Path(home) / "graph"
            inside.mkdir()
            _write(inside, files)
            _require_sizes(graph, inside)
            os.rename(inside, folder)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error}") from error


def read_checksums(file: Path) -> dict[str, Checksum]:
    """Checksums by file name, from a file of `sha256sum`. Raises BadInput for a malformed line, by its number."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_LONGEST_CHECKSUMS).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: cannot be read ({error})") from error
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        digits, _, name = line.partition(" ")
        name = name.removeprefix(" ").removeprefix("*")
        try:
            found[name] = Checksum("sha256", digits)
        except BadInput as error:
            raise BadInput(f"{file}, line {number}: {error}") from error
        if not name:
            raise BadInput(f"{file}, line {number}: a checksum without a file's name")
    return found


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    lines = (f"{Checksum.of(content).digits}  {name}\n" for name, content in sorted(files.items()))
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def _require_sizes(graph: PublishedGraph, folder: Path) -> None:
    read = load_graph(folder)
    found = replace(
        graph,
        entities=len(read.entities),
        relations=len(read.relations),
        train=len(read.train),
        valid=len(read.valid),
        test=len(read.test),
    )
    if found != graph:
        names = ("entities", "relations", "train", "valid", "test")
        here, published = (", ".join(f"{getattr(each, name):,} {name}" for name in names) for each in (found, graph))
        raise BadInput(f"{graph.name} was published with {published}; downloaded were {here}")
