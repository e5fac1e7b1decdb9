"""Tables moved from one store to another, however either of them splits or keeps its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, StoreFailed, TableNotFound
from elastable.embedding_store.optimizers.registry import row_optimizer

__all__ = ["Progress", "copy_tables", "repartition"]

Progress = Callable[[str, int, int], None]
"""Is called after every block with the table, its rows moved so far, and its rows in all."""

_BLOCK_BYTES = 16 << 20


def repartition(
    source: EmbeddingStore,
    target: EmbeddingStore,
    *,
    tables: Iterable[str] | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Copies tables with their rows and slots, exactly as they are, and the version.

    From n shards to m, from one strategy to another, from any backend to any other. One block of about 16 MiB is in
    memory at a time. Nothing may be committed to the source meanwhile.

    Args:
        source: Is read, and stays as it is.
        target: Gets the tables; those that it lacks are created.
        tables: Which; None: all.
        replace: Whether rows that the target has in these tables are given up.
        progress: Is told how far each table is.

    Returns:
        Table -> how many rows were copied.

    Raises:
        TableNotFound: the source has no such table.
        BadInput: the target has rows in one of the tables, and `replace` is False; nothing was changed.
        SpecConflict: the target has a table of that name with another spec.
        Unsupported: the target's backend cannot keep such a table.
        StoreFailed: the source was committed to meanwhile; copy again.
    """
    version, specs = source.version(), source.specs()
    names = sorted(specs) if tables is None else list(tables)
    for name in names:
        if name not in specs:
            raise TableNotFound(f"no table {name!r} to copy; tables there: {', '.join(sorted(specs)) or 'none'}")
    there = target.specs()
    for name in names:
        if name in there and not replace and (count := target.row_count(name)):
            raise BadInput(f"the target has {count} rows in table {name!r} already; replace=True gives them up")
    copied = copy_tables(source, target, progress, {name: specs[name] for name in names})
    if source.version() != version:
        raise StoreFailed(
            f"the source went from version {version} to {source.version()} while it was copied; copy it again"
        )
    target.reset_version(version)
    return copied


def copy_tables(
    source: EmbeddingStore,
    target: EmbeddingStore,
    progress: Progress | None = None,
    specs: Mapping[str, TableSpec] | None = None,
) -> dict[str, int]:
    """As `repartition`, and nothing is checked: rows of the target are given up, and its version stays.

    Args:
        source, target, progress: As of `repartition`.
        specs: Tables of the source by name; None: all.
    """
    specs = source.specs() if specs is None else specs
    for spec in specs.values():
        if not target.create_table(spec):
            target.clear(spec.name)
    return {name: _copy(source, target, spec, progress) for name, spec in sorted(specs.items())}


def _copy(source: EmbeddingStore, target: EmbeddingStore, spec: TableSpec, progress: Progress | None) -> int:
    total, done = source.row_count(spec.name), 0
    row_bytes = 4 * (spec.dim + row_optimizer(spec.optimizer).slot_width(spec.dim))

    def told(blocks: Iterator[RowBlock]) -> Iterator[RowBlock]:
        nonlocal done
        for block in blocks:
            yield block
            # The next one is asked for once this one is written.
            done += len(block.ids)
            if progress is not None:
                progress(spec.name, done, total)

    target.put(spec.name, told(source.scan(spec.name, max(1, _BLOCK_BYTES // row_bytes))))
    if state := source.table_state(spec.name):
        target.put_table_state(spec.name, state)
    return done
