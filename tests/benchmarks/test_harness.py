"""Figures are medians of interleaved rounds, written as they are shown; pages quote those of the last run."""

import json
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import RESULTS, Row, compare, interleaved, publish, rate
from benchmarks.pages import FIGURES, QUOTING, figures, filled


def test_everyone_has_one_turn_a_round_and_begins_in_turn() -> None:
    order: list[str] = []

    def contender(name: str) -> float:
        order.append(name)
        return float(len(order))

    rounds = interleaved({name: (lambda name=name: contender(name)) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab"
    assert rounds == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    row = compare("x", "rows/s", [10.0, 30.0, 20.0], [10.0, 10.0, 40.0], floor=1.0)
    assert row == Row("x", 20.0, "rows/s", 10.0, 1.0, 1.0)
    assert row.verdict == "ok"


def test_of_times_less_is_better() -> None:
    row = compare("x", "us", [20.0], [10.0], floor=0.8)
    assert (row.ratio, row.verdict) == (0.5, "below")


def test_a_rate_counts_what_was_done() -> None:
    assert rate(lambda: None, 1.0, at_least_s=0.0)() > 0


def test_rows_are_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    publish("x", "Title", [Row("a", 2.0, "rows/s", 1.0, 2.0, None), Row("b", 0.5, "rows/s", 1.0, 0.5, 0.8)])
    assert json.loads((tmp_path / "x.json").read_text()) == [
        {"name": "a", "value": 2.0, "unit": "rows/s", "reference": 1.0, "ratio": 2.0, "floor": None},
        {"name": "b", "value": 0.5, "unit": "rows/s", "reference": 1.0, "ratio": 0.5, "floor": 0.8},
    ]
    shown = capsys.readouterr().out  # type: ignore[attr-defined]
    assert "below" in shown
    assert "cores" in shown


ROOT = Path(__file__).parents[2]
ROWS = [
    {"name": "lookup, fast", "value": 12_345.6, "unit": "rows/s", "reference": 0.5, "ratio": 2.0, "floor": 1.5},
    {"name": "write", "value": 3.25, "unit": "us", "reference": None, "ratio": None, "floor": None, "note": "absent"},
]
HEAD = "| measured | ours | reference | ratio | floor |\n| --- | ---: | ---: | ---: | ---: |\n"
ALONE = "| measured | ours, us | ratio |\n| --- | ---: | ---: |\n| write | 3.25 | absent |\n"
FAST = "| lookup, fast | 12,346 rows/s | 0.5 | 2.00 | 1.5 |\n"
WRITE = "| write | 3.25 us |  | absent |  |\n"


def test_a_table_is_made_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "wire.json").write_text(json.dumps(ROWS))
    page = "a\n<!-- results wire -->\nold\n<!-- end -->\nb\n<!-- results wire: write | none -->\n<!-- end -->\n"
    expected = (
        f"a\n<!-- results wire -->\n{HEAD}{FAST}{WRITE}<!-- end -->\nb\n"
        f"<!-- results wire: write | none -->\n{ALONE}<!-- end -->\n"
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
