"""Pages quote the figures of the last run."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import RESULTS
from benchmarks.pages import FIGURES, QUOTING, figures, filled

ROOT = Path(__file__).parents[2]
ROWS = [
    {"name": "lookup, fast", "value": 12_345.6, "unit": "rows/s", "reference": 0.5, "ratio": 2.0, "floor": 1.5},
    {"name": "write", "value": 3.25, "unit": "us", "reference": None, "ratio": None, "floor": None, "note": "absent"},
]
HEAD = "| measured | ours | reference | unit | ratio | floor |\n| --- | ---: | ---: | --- | ---: | ---: |\n"
FAST = "| lookup, fast | 12,346 | 0.5 | rows/s | 2.00 | 1.5 |\n"
WRITE = "| write | 3.25 |  | us | absent |  |\n"


def test_a_table_is_made_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "wire.json").write_text(json.dumps(ROWS))
    page = "a\n<!-- results wire -->\nold\n<!-- end -->\nb\n<!-- results wire: write | none -->\n<!-- end -->\n"
    expected = (
        f"a\n<!-- results wire -->\n{HEAD}{FAST}{WRITE}<!-- end -->\nb\n"
        f"<!-- results wire: write | none -->\n{HEAD}{WRITE}<!-- end -->\n"
    )
    assert filled(page, tmp_path) == expected
    assert filled(expected, tmp_path) == expected


def test_a_table_without_a_file_is_left_as_it_is(tmp_path: Path) -> None:
    page = "<!-- results absent -->\nold\n<!-- end -->\n"
    assert filled(page, tmp_path) == page


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: page.name)
def test_what_a_page_quotes_is_what_the_files_say(page: Path) -> None:
    text = page.read_text()
    assert "<!-- results" in text
    assert filled(text, RESULTS) == text


def test_the_page_of_all_figures_is_what_the_files_say() -> None:
    assert FIGURES.read_text() == figures(RESULTS), "run python -m benchmarks.pages"


def test_only_pages_that_are_compared_quote_figures() -> None:
    quoting = {page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")] if "<!-- results" in page.read_text()}
    assert quoting == set(QUOTING)
