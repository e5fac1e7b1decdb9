"""docs/keras.md says what is so: every row is run against plain Keras, and nothing that Keras takes has no row."""

import re
from pathlib import Path

import keras
import pytest

from elastable.embedding_store.errors import Unsupported
from tests.keras_table.case import Case, Different, Side, trained, verdict
from tests.keras_table.keras_names import keras_names
from tests.keras_table.page import OTHERS, SECTIONS, Verdicts, page, verdicts

PAGE = Path(__file__).parents[2] / "docs" / "keras.md"
STRIDE = 24  # of the rows that run here; all of them do at night
ALL = [case for cases in SECTIONS.values() for case in cases]


def _rows(text: str, section: str) -> list[str]:
    """Of the first two columns."""
    lines = text.split(f"\n## {section}\n")[1].split("\n## ")[0].strip().splitlines()
    assert lines[1].startswith("| --- | --- |")
    return ["|".join(re.split(r"(?<!\\)\|", line)[:3]) + "|" for line in lines[2:]]


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1, STRIDE))])
@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_is_what_ran(section: str, first: int) -> None:
    found, wrong = verdicts({section: SECTIONS[section][first::STRIDE]})
    assert not wrong, "\n".join(["These are neither as in Keras nor refused:", *wrong])
    assert _rows(page(found), section) == _rows(PAGE.read_text(), section)[first::STRIDE], "run make keras-table"


def test_every_case_has_its_row_on_the_page() -> None:
    written = {section: [(case.name, "") for case in cases] for section, cases in SECTIONS.items()}
    for section in SECTIONS:
        expected = [row.removesuffix(" |  |") for row in _rows(page(written), section)]
        rows = _rows(PAGE.read_text(), section)
        assert len(rows) == len(expected), "run make keras-table"
        assert all(row.startswith(f"{name} | ") for row, name in zip(rows, expected, strict=True))


def test_the_page_is_of_this_keras_and_of_these_sections() -> None:
    none: Verdicts = {section: [] for section in SECTIONS}
    empty = page(none, dict.fromkeys(OTHERS, none))
    said = "\n".join(line for line in PAGE.read_text().splitlines() if not line.startswith("| ") or line in empty)
    assert said.split() == empty.split(), "run make keras-table"


def test_everything_that_keras_takes_has_a_row() -> None:
    covered = {name for case in ALL for name in case.covers.split()}
    assert not keras_names() - covered, "give each a case in tests/keras_table"


def test_every_row_is_there_once() -> None:
    names = [case.name for case in ALL]
    assert len(names) == len(set(names))


# --- the machinery notices what differs -------------------------------------------------------------


def test_a_program_that_trains_differently_is_no_row() -> None:
    def program(side: Side) -> object:
        return trained(side, optimizer=keras.optimizers.SGD(0.5 if side.stored else 0.4))

    with pytest.raises(Different, match=r"twice the rate: /weights/items/0 differs by"):
        verdict(Case("twice the rate", program))


def test_what_is_said_differently_is_no_row_either() -> None:
    with pytest.raises(Different, match="is 'ours', with plain Keras 'theirs'"):
        verdict(Case("a word", lambda side: {"word": "ours" if side.stored else "theirs"}, meaning="anything"))
    with pytest.raises(Different, match=r"plain Keras alone has \['/a'\], ours \[\]"):
        verdict(Case("a name", lambda side: {} if side.stored else {"a": 1.0}, meaning="anything"))


def test_a_row_of_repeated_ids_says_where_plain_keras_has_the_same_numbers() -> None:
    with pytest.raises(Different, match="has the same numbers by now"):
        verdict(Case("SGD", lambda side: trained(side), repeats=True))


def test_another_error_is_no_refusal() -> None:
    def program(side: Side) -> object:
        return {"a": [1.0][side.stored]}

    with pytest.raises(IndexError):
        verdict(Case("an accident", program))


def test_a_refusal_is_quoted() -> None:
    def program(side: Side) -> object:
        if side.stored:
            raise Unsupported("not\n this | one")
        return {}

    assert verdict(Case("refused", program)) == r"refused: not this \| one"
