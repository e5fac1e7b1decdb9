"""What `elastable status` shows of names that others gave themselves."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from elastable.commands.look import _progress_table
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
