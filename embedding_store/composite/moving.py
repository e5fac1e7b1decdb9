"""Tables moved from one store to another, however either of them splits or keeps its rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, StoreFailed, TableNotFound, Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.shards.ownership import Move
from elastable.embedding_store.shards.server_contract import ShardServer

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
        progress: Is notified how far each table is.

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

    def counted(blocks: Iterator[RowBlock]) -> Iterator[RowBlock]:
        nonlocal done
        for block in blocks:
            yield block
            # The next one is asked for once this one is written.
            done += len(block.ids)
            if progress is not None:
                progress(spec.name, done, total)

    target.put(spec.name, counted(source.scan(spec.name, max(1, _BLOCK_BYTES // row_bytes))))
    if state := source.table_state(spec.name):
        target.put_table_state(spec.name, state)
    return done


# The rows of a job moved from its store servers to others, between two versions, in one step that counts


@dataclass(frozen=True, slots=True)
class MovedRows:
    """What was moved.

    Attributes:
        version: That the rows are of.
        rows: Table -> rows that were copied; empty where an earlier call had copied them.
    """

    version: int
    rows: Mapping[str, int]


def move_job(
    old: Mapping[str, ShardServer], new: Mapping[str, ShardServer], progress: Progress | None = None
) -> MovedRows:
    """Moves the tables of a job, its version and its record from some store servers to others.

    The old servers hold the job until the new ones have everything; then one server says that it has gone, in one
    entry of its log. Whenever this breaks off, it may be called again with the same servers: it begins anew before
    that entry, and completes what is left after it. One block of rows is in memory at a time.

    Args:
        old: By address, in the order of the job's `--stores`. Nobody else owns them meanwhile.
        new: The same of the servers that get the rows: empty ones. A server may be in both where it keeps its place
            and their number stays; it keeps its rows.
        progress: Is notified how far each table is.

    Raises:
        BadInput: the lists cannot be, a new server is not empty, or the rows have moved elsewhere.
        Unsupported: a new server has no log.
        StoreFailed, Unavailable: a server failed; call it again.
    """
    move = _Moving(old, new)
    gone = Move.from_bytes(old[move.leaving].record())
    if gone is None:
        copied = move.copy(progress)
        move.switch()
    else:
        copied = {}
        move.require_same(gone, move.leaving)
    return MovedRows(move.finish(), copied)


class _Moving:
    def __init__(self, old: Mapping[str, ShardServer], new: Mapping[str, ShardServer]) -> None:
        self._old, self._new = old, new
        self._lists = tuple(old), tuple(new)
        _refuse_lists(*self._lists)
        self._coming = [address for address in new if address not in old]
        self.leaving = next(address for address in old if address not in new)
        """The old server whose log says that the rows have gone."""
        self._first = self._coming[0]
        """The new server that says that they have not all come."""

    def copy(self, progress: Progress | None) -> dict[str, int]:
        """Brings everything to the new servers, which say that they do not count yet."""
        source = StoreServers(list(self._old.values()))
        source.recover()
        version, record = source.version(), source.record()
        if record is None:
            raise BadInput(f"{', '.join(self._old)}: no version has a record, so there is no job to move")
        firsts = next(iter(self._new)) == self._first
        self._make_empty()
        coming = Move(*self._lists, gone=False, record=record if firsts else None).to_bytes()
        self._new[self._first].reset_version(0, coming)
        if len(self._old) == len(self._new):
            copied: dict[str, int] = {}
            for (one, here), (other, there) in zip(self._old.items(), self._new.items(), strict=True):
                if one != other:
                    for table, rows in copy_tables(here, there, progress).items():
                        copied[table] = copied.get(table, 0) + rows
        else:
            cut = {table: source.group.partition(table).strategy for table in source.specs()}
            copied = copy_tables(source, StoreServers(list(self._new.values()), strategies=cut), progress)
        for address in reversed(self._coming):
            self._new[address].reset_version(version, coming if address == self._first else None)
        if source.version() != version:
            raise StoreFailed(f"the store servers went from version {version} to {source.version()} meanwhile")
        return copied

    def switch(self) -> None:
        """From this entry on the new servers count."""
        store = self._old[self.leaving]
        store.reset_version(store.version(), Move(*self._lists, gone=True).to_bytes())

    def finish(self) -> int:
        """The new servers say so too; the version."""
        store = self._new[self._first]
        version, said = store.version(), Move.from_bytes(store.record())
        if said is not None:
            self.require_same(said, self._first)
            store.reset_version(version, said.record)
        return version

    def require_same(self, move: Move, address: str) -> None:
        """Raises `BadInput` where a server says that the rows move elsewhere."""
        if (move.old, move.new) != self._lists:
            raise BadInput(f"store server {address} has a part in another move of rows: `{move.command}`")

    def _make_empty(self) -> None:
        """The new servers, of what an earlier call left there. Raises `BadInput` where they hold anything else."""
        said = Move.from_bytes(self._new[self._first].record())
        if said is not None:
            self.require_same(said, self._first)
        for address in self._coming:
            store = self._new[address]
            if not store.keeps_records:
                raise Unsupported(
                    f"store server {address} has no log, and rows that only lie in its memory could be lost by now: "
                    "start it with --store memory?log=/folder, file:///folder or redis://host:port"
                )
            if said is None and (store.specs() or store.version()):
                raise BadInput(f"store server {address} holds rows at version {store.version()}: name empty ones")
        for address in reversed(self._coming):
            for table in self._new[address].specs():
                self._new[address].drop_table(table)
            if address != self._first and self._new[address].version():
                self._new[address].reset_version(0)


def _refuse_lists(old: tuple[str, ...], new: tuple[str, ...]) -> None:
    if set(old) == set(new):
        raise BadInput(f"--from and --to name the same store servers ({', '.join(new)}): nothing is to be moved")
    staying = [address for address in new if address in old]
    if staying and len(old) != len(new):
        raise BadInput(
            f"store server {staying[0]} is in --from and in --to: with {len(new)} servers in the place of "
            f"{len(old)} each of them holds other rows; start new servers, which may be on the same hosts"
        )
    for address in staying:
        if old.index(address) != new.index(address):
            raise BadInput(f"store server {address} has place {old.index(address)} in --from: it keeps it in --to")
    if not set(old) - set(new) or not set(new) - set(old):
        raise BadInput("--from and --to are to name different store servers")
