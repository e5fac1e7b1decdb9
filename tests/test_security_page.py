"""Every test that the table of attacks names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
ROWS = [line.split("|") for line in PAGE[PAGE.index("| attack | defence | test |") :].splitlines()[2:]]
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].strip()[:40])
def test_the_tests_of_an_attack_exist(row: list[str]) -> None:
    named = re.findall(r"`([^`]+)`", row[-2])
    assert named, "an attack without a test"
    file = ""
    for name in named:
        if name.startswith("make "):
            assert f"\n{name.removeprefix('make ')}:" in (ROOT / "Makefile").read_text()
        elif name.endswith(".py") or "::" in name:
            file = name.partition("::")[0].rpartition("/")[2] or file
            assert file in FILES, f"no such file: {file}"
            for part in name.split("::")[1:]:
                assert re.search(rf"\b(def|class) {part}\b", FILES[file].read_text()), name
        else:
            assert name in FILES[file].read_text(), f"{name} in {file}"


def test_an_attack_without_a_test_would_be_found() -> None:
    with pytest.raises(AssertionError, match="without a test"):
        test_the_tests_of_an_attack_exist(["", "an attack", "a defence", "none", ""])
    with pytest.raises(AssertionError, match=r"no such file: test_gone\.py"):
        test_the_tests_of_an_attack_exist(["", "an attack", "a defence", "`test_gone.py`", ""])
    with pytest.raises(AssertionError, match="test_no_such"):
        test_the_tests_of_an_attack_exist(["", "an attack", "a defence", "`test_roles.py::test_no_such`", ""])
