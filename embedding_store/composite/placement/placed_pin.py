"""One version of stores of several places, pinned in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.refusals import refuse_other_version
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import ElastableError, TableNotFound
from elastable.embedding_store.tables.base_store import BaseSnapshot

__all__ = ["PlacedPin"]


class PlacedPin(BaseSnapshot):
    """As `Snapshot`.

    Args:
        pins: Of the same version, by the name of the place; released with this one.
        place: The name of the place where a table of a name is.
        version: That version.
    """

    def __init__(self, pins: Mapping[str, Snapshot], place: Callable[[str], str], version: int) -> None:
        def specs() -> dict[str, TableSpec]:
            return {name: spec for pin in pins.values() for name, spec in pin.specs().items()}

        super().__init__(version, specs)
        self._pins, self._place = pins, place

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """As in `RowSource.lookup`."""
        refuse_other_version(self._version, version)
        by_place: dict[str, dict[str, Int64]] = {}
        for table, wanted in ids.items():
            self._pin_of(table)
            by_place.setdefault(self._place(table), {})[table] = wanted
        found = {table: rows for place, of in by_place.items() for table, rows in self._pins[place].lookup(of).items()}
        return {table: found[table] for table in ids}

    def renew(self, lease_s: float | None = None) -> None:
        """As in `Snapshot.renew`, in every place."""
        self._require_open()
        for pin in self._pins.values():
            pin.renew(lease_s)

    def row_count(self, table: str) -> int:
        """As in `Snapshot.row_count`."""
        return self._pin_of(table).row_count(table)

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `Snapshot.scan`."""
        return self._pin_of(table).scan(table, block_rows)

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As in `Snapshot.read_rows`."""
        return self._pin_of(table).read_rows(table, ids)

    def sightings(self, table: str) -> UInt8 | None:
        """As in `Snapshot.sightings`."""
        return self._pin_of(table).sightings(table)

    def _release(self) -> None:
        """In every place; in one that is not reached the lease runs out."""
        failed: ElastableError | None = None
        for pin in self._pins.values():
            try:
                pin.close()
            except ElastableError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _pin_of(self, table: str) -> Snapshot:
        self._require_open()
        pin = self._pins[self._place(table)]
        held = self.specs()
        if table not in held:
            raise TableNotFound(f"no table {table!r}; tables here: {', '.join(sorted(held)) or 'none'}")
        return pin
