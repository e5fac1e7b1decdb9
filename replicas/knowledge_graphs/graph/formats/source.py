"""How the user names a graph: `FOLDER`, `FOLDER?head=A&header=no`, or `ogb:FOLDER`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, urlencode

from elastable.embedding_store.errors import BadInput

__all__ = ["COLUMNS", "FOREIGN", "HEADERS", "GraphSource"]

COLUMNS = ("head", "relation", "tail")
"""Names of the columns of CSV and Parquet files, unless the source names others."""

FOREIGN = ("ogb",)
"""Formats that are named before a colon."""

HEADERS = ("auto", "yes", "no")
"""Whether files of names have a header: recognised by its words, always, or never."""

_HEADER = "header"


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph as the user named it.

    Attributes:
        place: A folder.
        kind: One of `FOREIGN`; "": files of names.
        columns: Names of the columns of head, relation and tail in CSV and Parquet files.
        header: Whether `train.txt` and CSV files, and those of the other splits, begin with a header; one of `HEADERS`.
    """

    place: str
    kind: str = ""
    columns: tuple[str, str, str] = COLUMNS
    header: str = "auto"

    @classmethod
    def parse(cls, source: str | os.PathLike[str]) -> Self:
        """Reads a source; a folder that exists is one, whatever its name.

        Raises:
            BadInput: columns that are not named `head`, `relation` or `tail`, a header that is not one of `HEADERS`, or
                either for a format that has none.
        """
        said = os.fspath(source)
        if os.path.isdir(said):
            return cls(said)
        place, _, query = said.partition("?")
        kind, colon, rest = place.partition(":")
        known = bool(colon) and kind in FOREIGN
        if known and query:
            raise BadInput(f"{said}: files of {kind} have no columns to name, and no header to choose")
        named = dict(parse_qsl(query, keep_blank_values=True))
        if set(named) - {*COLUMNS, _HEADER} or not all(named.values()) or (query and not named):
            raise BadInput(f"{said}: name columns as FOLDER?head=A&relation=B&tail=C&header=yes; got {query!r}")
        head, relation, tail = (named.get(each, each) for each in COLUMNS)
        found = cls(rest if known else place, kind if known else "", (head, relation, tail))
        return found.with_header(named.get(_HEADER, "auto"))

    def with_header(self, header: str) -> Self:
        """The same graph, whose files are said to have a header ("yes"), to have none ("no"), or neither ("auto").

        Raises:
            BadInput: another word, or a graph in a format without headers.
        """
        if header not in HEADERS:
            raise BadInput(f"header {header!r}: known are {', '.join(HEADERS)}")
        if header != "auto" and self.kind:
            raise BadInput(f"{self}: files of {self.kind} have no header to choose")
        if header == "no" and self.columns != COLUMNS:
            raise BadInput(f"{self}: columns are named by a header; leave out their names, or header=no")
        return replace(self, header=header)

    def absolute(self) -> Self:
        """The same graph, to be found from any working directory."""
        return replace(self, place=str(Path(self.place).resolve())) if os.path.isdir(self.place) else self

    def __str__(self) -> str:
        said = f"{self.kind}:{self.place}" if self.kind else self.place
        query = {} if self.columns == COLUMNS else dict(zip(COLUMNS, self.columns, strict=True))
        query |= {} if self.header == "auto" else {_HEADER: self.header}
        return f"{said}?{urlencode(query)}" if query else said
