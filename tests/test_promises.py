"""Every promise of `promises.toml` is said where the list has it, and held by tests that are there."""

import re
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROMISES: dict[str, dict[str, list[str]]] = tomllib.loads((TESTS / "promises.toml").read_text())


def squeezed(text: str) -> str:
    return " ".join(text.split())


def missing_sentences(text: str, sentences: list[str]) -> list[str]:
    return [sentence for sentence in sentences if sentence not in squeezed(text)]


def missing_tests(names: list[str]) -> list[str]:
    """Those of `FILE` or `FILE::NAME`, of a function or class, that are not below tests/."""

    def is_there(name: str) -> bool:
        file, _, test = name.partition("::")
        path = TESTS / file
        return path.is_file() and (not test or bool(re.search(rf"\b(def|class) {test}\b", path.read_text())))

    return [name for name in names if not is_there(name)]


@pytest.mark.parametrize("page", PROMISES)
def test_promises_of_a_page_are_said_and_held(page: str) -> None:
    promises = PROMISES[page]
    assert missing_sentences((TESTS.parent / page).read_text(), list(promises)) == []
    assert all(promises.values()), "a promise without a test"
    assert missing_tests([name for names in promises.values() for name in names]) == []


def test_what_is_missing_is_named() -> None:
    assert missing_sentences("It is\nso.", ["It is so.", "It is not."]) == ["It is not."]
    gone = ["test_gone.py", "test_promises.py::test_gone"]
    assert missing_tests(["test_promises.py::test_what_is_missing_is_named", *gone]) == gone
