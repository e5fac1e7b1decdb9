"""Writes the figures of the last run into the pages that quote them.

    python -m benchmarks.pages docs/benchmarks.md README.md

A page marks the table of `results/NAME.json` with `<!-- results NAME -->` before and
`<!-- end -->` after it; `<!-- results NAME: some text | other text -->` selects
the rows whose names start with one of the texts.
"""

import json
import re
import sys
from pathlib import Path

from benchmarks.harness import RESULTS
from elastable.embedding_store.contract.malformed import DocumentFields

_BLOCK = re.compile(r"(<!-- results (\w+)(?:: ([^>]*?))? -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = "| measured | ours | reference | unit | ratio | floor |\n| --- | ---: | ---: | --- | ---: | ---: |\n"


def main(pages: list[str]) -> None:
    """Fills the tables of every page, in place."""
    for name in pages:
        page = Path(name)
        page.write_text(filled(page.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


def filled(text: str, results: Path) -> str:
    """The page's text with its tables made of `results/*.json`; a table without a file is left as it is."""

    def table(block: re.Match[str]) -> str:
        file = results / f"{block[2]}.json"
        if not file.exists():
            return block[0]
        wanted = tuple(part.strip() for part in block[3].split("|")) if block[3] else ("",)
        rows = [row for row in json.loads(file.read_text()) if row["name"].startswith(wanted)]
        return f"{block[1]}{_HEAD}{''.join(map(_line, rows))}{block[4]}"

    return _BLOCK.sub(table, text)


def _line(row: DocumentFields) -> str:
    ratio = row.get("note", "") if row["ratio"] is None else f"{row['ratio']:.2f}"
    floor = "" if row["floor"] is None else f"{row['floor']:g}"
    figures = " | ".join(_figure(row[name]) for name in ("value", "reference"))
    return f"| {row['name']} | {figures} | {row['unit']} | {ratio} | {floor} |\n"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"


if __name__ == "__main__":
    main(sys.argv[1:])
