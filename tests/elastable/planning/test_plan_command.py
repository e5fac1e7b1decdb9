"""`elastable plan --examples-per-second`: a sizing of a real model, whose micro-batches are computed here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.errors import BadInput

WIDE = {"COLUMNS": "200"}
MODEL = Path(__file__).parents[3] / "examples" / "minimal.py"


def run(*words: str) -> str:
    ran = CliRunner().invoke(app, ["plan", str(MODEL), *words], env=WIDE)
    if isinstance(ran.exception, BadInput):
        raise ran.exception
    return ran.output


def test_a_sizing_counts_the_rows_and_dense_variables_of_the_model() -> None:
    said = json.loads(run("--examples-per-second", "20000", "--step-seconds", "0.01", "--json"))
    sizing = said["sizing"]
    assert sizing["examples_per_s"] >= 20_000
    dense = sum(variable["bytes"] for variable in said["dense"])
    each = sizing["pace"]
    # Dense variables go to every worker and their gradients come back, once a version.
    assert sizing["master_bits"] == pytest.approx(8 * dense * each["workers"] / each["version_s"])
    # A million rows of 8 values with a slot each, and the index: 100 bytes a row.
    assert 100e6 <= sizing["store_bytes"] * each["stores"] < 110e6


def test_a_table_shows_the_sizing_and_none_is_made_unasked() -> None:
    shown = run("--examples-per-second", "20000")
    assert "store server" in shown
    assert "examples/s: a version in" in shown
    assert "store server" not in run()


def test_settings_that_cannot_be_are_refused() -> None:
    assert "0 must be at least 1" in run("--examples-per-second", "0")
    with pytest.raises(BadInput, match="out of reach"):
        run("--examples-per-second", "1000000000000")
