"""How the user names a graph: `FOLDER`, `FOLDER?head=A&relation=B&tail=C`, `FORMAT:PLACE`, or an installed one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, urlencode

from elastable.embedding_store.errors import BadInput

__all__ = ["COLUMNS", "FOREIGN", "GraphSource"]

COLUMNS = ("head", "relation", "tail")
"""Names of the columns of CSV and Parquet files, unless the source names others."""

FOREIGN = ("ogb", "openke", "pykeen")
"""Formats that are named before a colon."""


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph as the user named it.

    Attributes:
        place: A folder, or a name.
        kind: One of `FOREIGN`; "": files of names.
        columns: Names of the columns of head, relation and tail in CSV and Parquet files.
    """

    place: str
    kind: str = ""
    columns: tuple[str, str, str] = COLUMNS

    @classmethod
    def parse(cls, source: str | os.PathLike[str]) -> Self:
        """Reads a source; a folder that exists is one, whatever its name.

        Raises:
            BadInput: columns that are not named `head`, `relation` or `tail`, or of a format that has none.
        """
        said = os.fspath(source)
        if os.path.isdir(said):
            return cls(said)
        place, _, query = said.partition("?")
        kind, colon, rest = place.partition(":")
        known = bool(colon) and kind in FOREIGN
        if known and query:
            raise BadInput(f"{said}: files of {kind} have no columns to name")
        named = dict(parse_qsl(query, keep_blank_values=True))
        if set(named) - set(COLUMNS) or not all(named.values()) or (query and not named):
            raise BadInput(f"{said}: name columns as FOLDER?head=A&relation=B&tail=C; got {query!r}")
        head, relation, tail = (named.get(each, each) for each in COLUMNS)
        return cls(rest if known else place, kind if known else "", (head, relation, tail))

    def absolute(self) -> Self:
        """The same graph, to be found from any working directory."""
        return replace(self, place=str(Path(self.place).resolve())) if os.path.isdir(self.place) else self

    def __str__(self) -> str:
        said = f"{self.kind}:{self.place}" if self.kind else self.place
        return said if self.columns == COLUMNS else f"{said}?{urlencode(dict(zip(COLUMNS, self.columns, strict=True)))}"
