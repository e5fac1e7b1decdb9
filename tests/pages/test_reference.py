"""docs/reference.md is what the code says: errors and exit codes, metrics, marks for commands and names."""

import runpy
from pathlib import Path

from elastable.embedding_store import errors
from elastable.monitoring.metrics import METRICS
from elastable.process.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference.md"


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == runpy.run_path(str(ROOT / "docs/site/reference.py"))["page"](), "run make reference"


def test_it_has_every_error_exit_code_and_metric() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for first in (*errors.__all__, *METRICS):
        assert sum(f"`{first}` |" in row.replace("&nbsp;", "") for row in rows) == 1, first
    for code in ExitCode:
        assert f"| {code.value} | {code.meaning} |" in rows
