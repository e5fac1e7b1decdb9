"""What `elastable status` shows of names that others gave themselves."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from elastable.commands.inspect import _integers, _progress_table
from elastable.embedding_store.errors import BadInput
from elastable.master.api import JobStatus


def test_markup_in_names_is_text() -> None:
    told = JobStatus(
        job="[blink]j[/blink]", state="[red]waiting", mode="sync", version=1, versions_total=2, epoch=0, epochs=1,
        records_trained=0, metrics={"[bold]auc": 0.5}, workers=(), store="redis://[::1]:7",
    )  # fmt: skip
    out = StringIO()
    Console(file=out, width=120).print(_progress_table(told))
    for text in ("job [blink]j[/blink]", "[red]waiting", "[bold]auc", "redis://[::1]:7"):
        assert text in out.getvalue()


def test_ids_of_the_command_line_are_never_floats() -> None:
    told = [2**53 + 1, -(2**63), 2**63 - 1]
    assert _integers("t", [str(one) for one in told]).tolist() == told
    for text in (str(2**63), "9" * 5_000, "1e3", "1.0"):
        with pytest.raises(BadInput, match="is no id of table 't'"):
            _integers("t", [text])
