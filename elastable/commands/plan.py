"""`elastable plan`: what of a model would live where, how large it is and why."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes, wide_console
from elastable.embedding_store.composite.locations import plan_tables
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.option import Option, required, setting
from elastable.jobs.options import MODEL_FILE, OFFLOAD_ABOVE
from elastable.models.table_places import locations_of
from elastable.process.quiet import import_tensorflow


@dataclass(frozen=True, slots=True)
class _PlanOptions:
    model_file: Path = required(MODEL_FILE)
    locations: Path | None = setting(None, Option("Location settings.", metavar="FILE.toml", unset="all in --store"))
    store: str = setting("memory", Option("The store of tables that have no other location.", metavar="URL"))
    offload_above: int = setting(0, replace(OFFLOAD_ABOVE, group=None))
    as_json: bool = setting(False, AS_JSON)


@takes(_PlanOptions)
def plan(options: _PlanOptions) -> None:
    """Show where the tensors of a model would live, with sizes and reasons; nothing is created."""
    import_tensorflow()
    from elastable.jobs.prepare import tables_of

    model, tables = tables_of(options.model_file, options.offload_above)
    placements = plan_tables(tables, locations_of(options.locations, options.store).settings)
    dense = [
        {
            "variable": it.path,
            "shape": list(it.shape),
            "bytes": int(it.value.dtype.size * it.value.shape.num_elements()),
        }
        for it in variables_of(model.weights)
    ]
    if options.as_json:
        names = ("table", "kind", "rows", "row", "elements", "row_bytes", "bytes", "reason")
        tables_shown = [
            {**{name: getattr(line, name) for name in names}, "location": line.location.storage} for line in placements
        ]
        typer.echo(json.dumps({"tables": tables_shown, "dense": dense}, indent=2))
        return
    shown = Table(
        "table", "tensor", "shape", "elements", "size", "location", "reason", title=f"plan of {options.model_file.name}"
    )
    for line in placements:
        rows = "any id" if line.rows is None else f"{line.rows:,}"
        elements = "grows" if line.elements is None else f"{line.elements:,}"
        size = f"{line.row_bytes:,} B a row" if line.bytes is None else readable_size(line.bytes)
        shown.add_row(line.table, line.kind, f"{rows} x {line.row}", elements, size, line.location.storage, line.reason)
    console = wide_console()
    console.print(shown)
    total = sum(it["bytes"] for it in dense)
    console.print(
        f"{len(dense)} dense variables, {readable_size(total)}: on the master, with their optimizer state, and on "
        "every worker"
    )


def readable_size(count: int) -> str:
    """Bytes for people: 12.3 MiB."""
    value, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if value < 1024:
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} {units[-1]}"
