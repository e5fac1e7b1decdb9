"""`elastable plan`: what of a model would live where, how large it is and why, and how many machines it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes
from elastable.embedding_store.composite.placement.locations import Placement, plan_tables
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.option import Option, check_options, required, setting
from elastable.embedding_store.support.store_url import byte_count
from elastable.jobs.options import MODEL_FILE
from elastable.jobs.shared_options import OFFLOAD_ABOVE
from elastable.models.table_places import locations_of
from elastable.planning.calibration import INSTALLED, Calibration
from elastable.planning.sizing import Sizing, sized
from elastable.process.quiet import import_tensorflow
from elastable.process.stopping import OutputConsole

if TYPE_CHECKING:
    import keras

__all__ = ["plan", "readable_size"]


_SIZING = "Sizing"
_INDEX_BYTES = 36
"""Of a row of a table of any ids, besides the row."""


@dataclass(frozen=True, slots=True)
class _PlanOptions:
    model_file: Path = required(MODEL_FILE)
    locations: Path | None = setting(None, Option("Location settings.", metavar="FILE.toml", unset="all in --store"))
    store: str = setting("memory", Option("The store of tables that have no other location.", metavar="URL"))
    offload_above: int = setting(0, replace(OFFLOAD_ABOVE, group=None))
    examples_per_second: int | None = setting(
        None,
        Option("Also size a job that trains so many.", at_least=1, unset="only locations are shown", group=_SIZING),
    )
    micro_batch_size: int = setting(
        256, Option("Examples that a worker computes at a time.", at_least=1, group=_SIZING)
    )
    server_memory: str = setting("16GiB", Option("Memory of a store server for rows.", metavar="SIZE", group=_SIZING))
    dynamic_rows: int = setting(
        1_000_000, Option("Rows to plan for in each table of any ids.", at_least=1, group=_SIZING)
    )
    step_seconds: float | None = setting(
        None,
        Option("Seconds in which a worker computes a micro-batch.", above=0, unset="measured here", group=_SIZING),
    )
    calibration: Path | None = setting(
        None,
        Option("Measured costs of processes.", metavar="FILE.json", unset="those of the package", group=_SIZING),
    )
    as_json: bool = setting(False, AS_JSON)

    def __post_init__(self) -> None:
        check_options(self)
        byte_count(self.server_memory)


@takes(_PlanOptions)
def plan(options: _PlanOptions) -> None:
    """Show where the tensors of a model would live, with sizes and reasons; nothing is created.

    With --examples-per-second also: how many workers and store servers train so fast, and what each of them needs. For
    that, a few micro-batches are computed here; other costs come from a calibration.
    """
    import_tensorflow()
    from elastable.jobs.prepare import tables_of

    model, tables = tables_of(options.model_file, options.offload_above)
    placements = plan_tables(tables, locations_of(options.locations, options.store).settings)
    dense = [(variable.path, tuple(variable.shape), _bytes(variable)) for variable in variables_of(model.weights)]
    sizing = None if options.examples_per_second is None else _sized(options, model, tables, placements)
    if options.as_json:
        typer.echo(json.dumps(_as_json(placements, dense, sizing), indent=2))
        return
    shown = Table(
        "table", "tensor", "shape", "elements", "size", "location", "reason", title=f"plan of {options.model_file.name}"
    )
    for line in placements:
        rows = "any id" if line.rows is None else f"{line.rows:,}"
        elements = "grows" if line.elements is None else f"{line.elements:,}"
        size = f"{line.row_bytes:,} B a row" if line.bytes is None else readable_size(line.bytes)
        shown.add_row(line.table, line.kind, f"{rows} x {line.row}", elements, size, line.location.storage, line.reason)
    console = OutputConsole()
    if not console.is_terminal:
        console = OutputConsole(width=160)
    console.print(shown)
    total = sum(size for _, _, size in dense)
    console.print(
        f"{len(dense)} dense variables, {readable_size(total)}: on the master, with their optimizer state, and on "
        "every worker"
    )
    if sizing is not None:
        console.print(_sizing_table(sizing))
        console.print(
            f"{sizing.examples_per_s:,.0f} examples/s: a version in {1e3 * sizing.pace.version_s:,.1f} ms, limited by "
            f"the {sizing.limit}",
            highlight=False,
        )


def _sized(
    options: _PlanOptions, model: keras.Model, tables: Mapping[str, TableSpec], placements: tuple[Placement, ...]
) -> Sizing:
    from elastable.planning.step_time import job_shape

    assert options.examples_per_second is not None
    costs = Calibration.read(options.calibration or INSTALLED)
    table_bytes = sum(
        options.dynamic_rows * line.row_bytes if line.bytes is None else line.bytes
        for line in placements
        if line.kind != "accumulator"
    )
    table_bytes += sum(options.dynamic_rows * _INDEX_BYTES for spec in tables.values() if spec.vocabulary_size is None)
    job = job_shape(options.model_file, model, tables, options.micro_batch_size, table_bytes)
    if options.step_seconds is not None:
        job = replace(job, step_s=options.step_seconds)
    return sized(job, costs, options.examples_per_second, byte_count(options.server_memory))


def _sizing_table(sizing: Sizing) -> Table:
    each = sizing.pace
    shown = Table("process", "number", "cores each", "memory for rows", "network", "busy", title="sizing")
    for name, count, size, bits, busy in (
        ("worker", each.workers, "", sizing.worker_bits, each.worker_s),
        ("store server", each.stores, readable_size(sizing.store_bytes), sizing.store_bits, each.store_s),
        ("master", 1, "", sizing.master_bits, each.master_s),
    ):
        share = f"{100 * busy / each.version_s:.0f} %"
        shown.add_row(name, f"{count:,}", "1", size, f"{bits / 1e9:,.2f} Gbit/s", share)
    return shown


def _as_json(
    placements: tuple[Placement, ...], dense: list[tuple[str, tuple[int, ...], int]], sizing: Sizing | None
) -> dict[str, object]:
    names = ("table", "kind", "rows", "row", "elements", "row_bytes", "bytes", "reason")
    return {
        "tables": [
            {**{name: getattr(line, name) for name in names}, "location": line.location.storage} for line in placements
        ],
        "dense": [{"variable": path, "shape": list(shape), "bytes": size} for path, shape, size in dense],
        **({} if sizing is None else {"sizing": asdict(sizing)}),
    }


def _bytes(variable: keras.Variable) -> int:
    return int(variable.value.dtype.size * variable.value.shape.num_elements())


def readable_size(count: int) -> str:
    """Bytes for people: 12.3 MiB."""
    value, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if value < 1024:
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} {units[-1]}"
