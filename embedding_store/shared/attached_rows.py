"""Tables that lie in another process' memory, mapped to be read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.files.mapping import FileMapping
from elastable.embedding_store.memory.id_index import IdIndex
from elastable.embedding_store.memory.row_directory import DirectRows, RowDirectory
from elastable.embedding_store.memory.row_values import RowValues
from elastable.embedding_store.memory.slab import Slab, SlabMaker
from elastable.embedding_store.row_dtypes import row_values
from elastable.embedding_store.shared.attachment import (
    LAYOUT,
    SlabShape,
    TableLayout,
    receive_packet,
    table_from_packet,
)
from elastable.embedding_store.spec import TableSpec
from elastable.embedding_store.store import Int64
from elastable.embedding_store.tables.table_reader import TableReader

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
        """Raises `MemoryError` where the system refuses, `StoreFailed` where there is less than the shape says."""
        self._columns = shape.columns
        self._dtype = np.dtype(shape.dtype)
        size = self._bytes(shape.rows)
        if os.fstat(fd).st_size < size:
            raise StoreFailed(f"shared memory holds {os.fstat(fd).st_size} bytes where {size} were announced")
        array = FileMapping(fd, size, size * _RESERVE_TIMES, writable=False).view(
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
        self._index = None if lies.direct else slabs[:behind]
        self._direct = self._directory(slabs[:behind]) if lies.direct else None
        self._values = row_values(lies.spec, 0, _handing_out(slabs[behind:], lies.spec))

    def now(self, whole: Callable[[], bool]) -> TableNow:
        """The table in the state that stands, as long as `whole()`; made anew for each state."""
        if self._direct is not None:
            return TableNow(self.spec, self._direct, self._values, whole)
        assert self._index is not None
        state, *others = self._index
        # The shape of the index must not change while ids are looked for: they would be looked for anywhere.
        directory = self._directory([FixedSlab(state.array.copy()), *others])
        return TableNow(self.spec, directory, self._values, whole)

    def _directory(self, slabs: Sequence[Slab]) -> RowDirectory:
        new_slab = _handing_out(slabs, self.spec)
        size = self.spec.vocabulary_size
        return DirectRows(size, new_slab) if self._index is None and size is not None else IdIndex(new_slab)


class TableNow(TableReader):
    """One state of a table, to read: its ids are not looked for in any other.

    `read` and `fold` raise `Torn` where the state is past and positions might be anything.
    """

    def __init__(self, spec: TableSpec, directory: RowDirectory, values: RowValues, whole: Callable[[], bool]) -> None:
        super().__init__(spec, _Checked(directory, whole), values)


class _Checked:
    """Finds positions, and hands none out of which it is not known that rows lie there."""

    def __init__(self, directory: RowDirectory, whole: Callable[[], bool]) -> None:
        self._directory = directory
        self._whole = whole
        self.marks = directory.marks
        self.count = directory.count

    def find(self, ids: Int64, positions: Int64) -> int:
        """As in `RowDirectory.find`; raises `Torn`."""
        missing = self._directory.find(ids, positions)
        if not self._whole():
            raise Torn
        return missing


class FixedSlab(Slab):
    """An array as a slab."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array


def attached_tables(connection: socket.socket, token: bytes) -> tuple[int, dict[str, AttachedTable]]:
    """The layout's generation and its tables, asked for on a fresh connection to the owner.

    Raises:
        OSError: the owner hung up or gave no answer in time.
        StoreFailed: the answer makes no sense.
        MemoryError: the system refuses to map so much.
    """
    connection.send(token + LAYOUT)
    begin, _ = receive_packet(connection)
    if begin is None:
        raise ConnectionError("the owner of the memory hung up")
    tables = {}
    for _ in range(int(begin["tables"])):
        packet, descriptors = receive_packet(connection)
        try:
            if packet is None:
                raise ConnectionError("the owner of the memory hung up")
            table = _attached(packet, descriptors)
            tables[table.spec.name] = table
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    return int(begin["generation"]), tables


def _attached(packet: dict[str, Any], descriptors: Sequence[int]) -> AttachedTable:
    lies: TableLayout = table_from_packet(packet)
    shapes = (*lies.directory, *lies.values)
    if len(shapes) != len(descriptors):
        raise StoreFailed(f"table {lies.spec.name!r}: {len(descriptors)} descriptors came for {len(shapes)} slabs")
    slabs = [MappedSlab(fd, shape) for fd, shape in zip(descriptors, shapes, strict=True)]
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
