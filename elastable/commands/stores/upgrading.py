"""`elastable store upgrade`: a store of an earlier release, rewritten while no job has it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from elastable.commands.command_line import takes
from elastable.embedding_store.option import Option, required
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.upgrade.store_upgrade import upgrade_store
from elastable.master.keras.row_optimizers.registration import register_job_optimizers

__all__ = ["upgrade"]


@dataclass(frozen=True, slots=True)
class _UpgradeOptions:
    url: str = required(
        Option(
            "URL of the store, as given to --store: redis://host:port, file:///folder, or several with token:.",
            metavar="URL", positional=True,
        )
    )  # fmt: skip


@takes(_UpgradeOptions)
def upgrade(options: _UpgradeOptions) -> None:
    """Rewrite a store of an earlier release as this release keeps it. If it is interrupted, run it again.

    Nothing of the old store is removed before the new one is complete; the server or disk has to hold both.
    """
    register_job_optimizers()
    console, rows = Console(stderr=True), Counter[str]()
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as progress:
        shown = progress.add_task("reading")

        def wrote(table: str, more: int) -> None:
            rows[table] += more
            progress.update(shown, description=f"{table}: {rows[table]:,} rows")

        upgraded = upgrade_store(options.url, wrote)
    where = redacted(options.url)
    if not upgraded:
        typer.echo(f"{where} holds nothing of an earlier release")
        return
    typer.echo(f"{where} is upgraded: {sum(rows.values()):,} rows of {len(rows)} tables written")
