"""Tables that lie in another process' memory, mapped to be read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.native.ids.id_index import IdIndex
from elastable.embedding_store.native.ids.id_lines import STATE_WORDS
from elastable.embedding_store.native.ids.row_directory import DirectRows, RowDirectory
from elastable.embedding_store.native.slab import Slab, SlabMaker
from elastable.embedding_store.rows.row_dtypes import row_values
from elastable.embedding_store.rows.row_values import RowValues
from elastable.embedding_store.support.memory.memory_mapping import FileMapping
from elastable.embedding_store.tables import TableReader
from elastable.embedding_store.wire.shared.attachment import (
    LAYOUT,
    Packet,
    SlabShape,
    TableLayout,
    receive_packet,
    table_from_packet,
)
from elastable.embedding_store.wire.shared.sealed_memory import require_sealed

__all__ = ["AttachedTable", "MappedSlab", "TableNow", "Torn", "attached_tables"]

_RESERVE_TIMES = 4


class Torn(Exception):
    """The owner changed something while it was read; what was read is to be thrown away."""


class MappedSlab(Slab):
    """A slab of another process, to read. It does not grow: a larger one is mapped anew.

    Args:
        fd: Descriptor of its memory; the caller closes it.
        shape: What lies there.
    """

    def __init__(self, fd: int, shape: SlabShape) -> None:
        """Raises `MemoryError` where the system refuses, `StoreFailed` where no such slab lies there."""
        self._columns = shape.columns
        self._dtype = np.dtype(shape.dtype)
        size = self._bytes(shape.rows)
        try:
            require_sealed(fd, shape.offset + size)
        except OSError as error:
            raise StoreFailed(str(error)) from error
        array = FileMapping(fd, size, size * _RESERVE_TIMES, writable=False, offset=shape.offset).view(
            shape.rows, shape.columns, self._dtype
        )
        # NumPy may think that it can be written: kernels are compiled for such arrays, and
        # would be compiled again for others. The system would not let anyone write.
        self._array = array


class AttachedTable:
    """One table of another process.

    Args:
        lies: How it lies.
        slabs: Its mapped slabs.
    """

    def __init__(self, lies: TableLayout, slabs: Sequence[MappedSlab]) -> None:
        self.spec = lies.spec
        behind = len(lies.directory)
        self._rows = min((len(slab.array) for slab in slabs[behind:]), default=0)
        self._index = None if lies.direct else slabs[:behind]
        self._direct = self._directory(slabs[:behind]) if lies.direct else None
        self._values = row_values(lies.spec, 0, _handing_out(slabs[behind:], lies.spec))
        if self._direct is not None:
            self._require_room(slabs[0], lies.spec)

    def now(self, whole: Callable[[], bool]) -> TableNow:
        """The table in the state that stands, as long as `whole()`; made anew for each state."""
        if self._direct is not None:
            return TableNow(self.spec, self._direct, self._values, whole, self._rows)
        assert self._index is not None
        state, *others = self._index
        if len(state.array) != STATE_WORDS:
            raise StoreFailed(f"table {self.spec.name!r}: its index has {len(state.array)} words, not {STATE_WORDS}")
        # The shape of the index must not change while ids are looked for: they would be looked for anywhere.
        directory = self._directory([FixedSlab(state.array.copy()), *others])
        return TableNow(self.spec, directory, self._values, whole, self._rows)

    def _require_room(self, live: Slab, spec: TableSpec) -> None:
        """Of a table whose row i lies at position i there must be so many, as nobody looks there again."""
        size = spec.vocabulary_size
        if size is None or self._rows < size or len(live.array) != -(-size // 64) + 1:
            raise StoreFailed(f"table {spec.name!r}: {self._rows} rows of {size} lie in shared memory")

    def _directory(self, slabs: Sequence[Slab]) -> RowDirectory:
        new_slab = _handing_out(slabs, self.spec)
        size = self.spec.vocabulary_size
        return DirectRows(size, new_slab) if self._index is None and size is not None else IdIndex(new_slab)


class TableNow(TableReader):
    """One state of a table, to read: its ids are not looked for in any other.

    `read` and `fold` raise `Torn` where the state is past and positions might be anything.
    """

    def __init__(
        self, spec: TableSpec, directory: RowDirectory, values: RowValues, whole: Callable[[], bool], rows: int
    ) -> None:
        """`rows`: how many positions there are."""
        super().__init__(spec, _Checked(directory, whole, spec.name, rows), values)


class _Checked:
    """Finds positions, and hands none out of which it is not known that rows lie there."""

    def __init__(self, directory: RowDirectory, whole: Callable[[], bool], table: str, rows: int) -> None:
        self._directory = directory
        self._whole = whole
        self._table, self._rows = table, rows
        self.marks = directory.marks
        self.count = directory.count

    def find(self, ids: Int64, positions: Int64) -> int:
        """Raises `Torn`, or `StoreFailed` if the index leads to no row."""
        missing = self._directory.find(ids, positions)
        if not self._whole():
            raise Torn
        last = int(positions.max()) if len(positions) else -1
        if last >= self._rows or not self._directory.sound:
            where = f"it leads to position {last} of {self._rows}" if last >= self._rows else "its state is none"
            raise StoreFailed(f"table {self._table!r}: its index in shared memory is damaged; {where}")
        return missing


class FixedSlab(Slab):
    """An array as a slab."""

    def __init__(self, array: npt.NDArray[np.generic]) -> None:
        self._array = array


def attached_tables(connection: socket.socket, token: bytes) -> tuple[int, dict[str, AttachedTable]]:
    """The layout's generation and its tables, asked for on a fresh connection to the owner.

    Raises:
        OSError: the owner hung up or gave no answer in time.
        StoreFailed: the answer is malformed.
        MemoryError: the system refuses to map so much.
    """
    connection.send(token + LAYOUT)
    begin, _ = receive_packet(connection)
    if begin is None:
        raise ConnectionError("the owner of the memory hung up")
    generation, count = begin.get("generation"), begin.get("tables")
    if type(generation) is not int or type(count) is not int:
        raise StoreFailed("the owner of shared rows does not say how many tables there are")
    tables = {}
    for _ in range(count):
        packet, descriptors = receive_packet(connection)
        try:
            if packet is None:
                raise ConnectionError("the owner of the memory hung up")
            table = _attached(packet, descriptors)
            tables[table.spec.name] = table
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    return generation, tables


def _attached(packet: Packet, descriptors: Sequence[int]) -> AttachedTable:
    lies: TableLayout = table_from_packet(packet)
    shapes = (*lies.directory, *lies.values)
    if not lies.directory or any(shape.memory >= len(descriptors) for shape in shapes):
        raise StoreFailed(f"table {lies.spec.name!r}: {len(descriptors)} descriptors came for {len(shapes)} slabs")
    slabs = [MappedSlab(descriptors[shape.memory], shape) for shape in shapes]
    return AttachedTable(lies, slabs)


def _handing_out(given: Sequence[Slab], spec: TableSpec) -> SlabMaker:
    """A `SlabMaker` that makes none: it hands out what there is, in order."""
    slabs = iter(given)

    def next_slab(part: str, rows: int, columns: int, dtype: npt.DTypeLike = np.float32, /) -> Slab:
        slab = next(slabs, None)
        if slab is None or slab.array.shape[1] != columns or slab.array.dtype != dtype:
            raise StoreFailed(f"table {spec.name!r}: its {part} do not lie in shared memory as they should")
        return slab

    return next_slab
