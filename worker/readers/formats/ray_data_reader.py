"""Records of a Ray Dataset, from the Arrow tables that Ray's object store holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import LocalFileSystem

from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.embedding_store.support.extras import needs
from elastable.worker.readers.formats.arrow_columns import ColumnChoice, Kinds
from elastable.worker.readers.formats.block_reader import BlockReader, Place, Transform
from elastable.worker.readers.formats.data_files import DataFile

if TYPE_CHECKING:
    import ray

_DIGEST_RECORDS = 64
_GET_S = 600.0  # in which Ray gives a block, which it may have to compute again


class RayDataReader(BlockReader):
    """A Ray Dataset as one record space, in its own order.

    The dataset is computed once, with its order kept, and its blocks stay in Ray's object store. In a job every process
    makes and computes it, on the Ray that runs the job, and one that comes to other records than the master is refused:
    seed what is random, and leave `materialize()` to the reader, as Ray alone keeps no order. A column is read as by
    `ParquetReader`. Tensors of one shape are lists of fixed size, those of several lengths ragged.

    Args:
        dataset: A `ray.data.Dataset`.
        features: Columns that make up x; None: all but label and weight.
        label: Column of the target; None: batches are `(x,)`.
        weight: Column of the sample weights.
        transform: Batch -> batch, one record for each; floats come to it in the type of their column.
        column_types, fill_null, fill_null_list: As of `ParquetReader`.
        block_records: Records that are read and shuffled together, however Ray has cut the dataset.
        cached_blocks: Number of decoded blocks to keep.

    Raises:
        BadInput: no Dataset; one that cannot be computed or holds no records; a column that a block lacks. Later, with
            record (counted from 0) and column: a type or a value that the model's input does not take, a null.
        Unavailable: Ray has lost a block.
        NotInstalled: `elastable[ray]` is not.
    """

    def __init__(
        self,
        dataset: ray.data.Dataset,
        features: Sequence[str] | None = None,
        label: str | None = None,
        weight: str | None = None,
        transform: Transform | None = None,
        *,
        column_types: Mapping[str, str] | None = None,
        fill_null: Mapping[str, object] | None = None,
        fill_null_list: Mapping[str, Sequence[object]] | None = None,
        block_records: int = 8192,
        cached_blocks: int = 4,
    ) -> None:
        with needs("et.RayDataReader", "ray"):
            import ray.data
        if not isinstance(dataset, ray.data.Dataset):
            raise BadInput(f"et.RayDataReader takes a ray.data.Dataset, and not a {type(dataset).__name__}")
        if block_records < 1:
            raise BadInput(f"Ray Dataset: block_records must be at least 1, got {block_records}")
        choice = ColumnChoice(features, label, weight, column_types, fill_null, fill_null_list)
        found = [(ref, table) for ref in _computed(dataset) if (table := _fetched(ref)).num_rows]
        if not found:
            raise BadInput("Ray Dataset: empty, there must be at least one record")
        self._refs = [ref for ref, _ in found]
        self._schemas = [table.schema for _, table in found]
        files = [DataFile(LocalFileSystem(), "", f"Ray Dataset, block {number}") for number in range(len(found))]
        self._firsts = np.cumsum([0, *(table.num_rows for _, table in found)])  # of each table, and the end
        # No block lies in two tables, whose columns may have different types, or crosses a multiple of block_records.
        cuts = [
            [start, *range(start // block_records * block_records + block_records, stop, block_records), stop]
            for start, stop in pairwise(self._firsts.tolist())
        ]
        together = np.bincount([start // block_records for each in cuts for start in each[:-1]]).max()
        names, counts = [schema.names for schema in self._schemas], [np.diff(each).tolist() for each in cuts]
        super().__init__(files, names, counts, choice, transform, cached_blocks * int(together))
        # The order of a job's records is that of any process, where Ray may have cut the dataset in another way.
        self.shuffle_block = block_records

    def types_of(self, name: str, want: str) -> Kinds:
        """The types that the tables of the blocks say."""
        return [(file, schema.field(name).type) for file, schema in zip(self.files, self._schemas, strict=True)]

    def read_block(self, file: int, block: int) -> tuple[pa.Table, Place]:
        """Reads a part of a table."""
        start, first = self.before(file, block), int(self._firsts[file])
        table = _fetched(self._refs[file], start, self.counts[file][block], self.in_file)
        return table, lambda record: f"Ray Dataset, record {first + start + record}"

    def digest(self) -> str:
        """Of some records, the first and the last among them."""
        hashed = hashlib.sha256()
        for record in np.unique(np.linspace(0, len(self) - 1, _DIGEST_RECORDS).astype(np.int64)).tolist():
            number = int(np.searchsorted(self._firsts, record, side="right")) - 1
            kinds = {field.name: field.type for field in self._schemas[number]}
            names = sorted(name for name, kind in kinds.items() if not isinstance(kind, pa.BaseExtensionType))
            one = _fetched(self._refs[number], record - int(self._firsts[number]), 1, names)
            hashed.update(repr(one.to_pylist()).encode())
        return hashed.hexdigest()


def _computed(dataset: ray.data.Dataset) -> Sequence[ray.ObjectRef]:
    """Its Arrow tables, in order."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        tables: Sequence[ray.ObjectRef] = dataset.materialize().to_arrow_refs()
    except Exception as error:  # of the user's functions, or of files that it reads
        raise BadInput(f"Ray Dataset: it cannot be computed: {error}") from error
    finally:
        options.preserve_order = before
    return tables


def _fetched(
    ref: ray.ObjectRef, start: int = 0, count: int | None = None, names: Sequence[str] | None = None
) -> pa.Table:
    """Records of a table in Ray's memory, with lists in the place of tensors."""
    import ray

    try:
        table = ray.get(ref, timeout=_GET_S).slice(start, count)
    except (ray.exceptions.RayError, ValueError) as error:  # the second of a Ray that was started anew
        raise Unavailable(f"Ray Dataset: Ray does not give a block: {error}") from error
    if names is not None:
        table = table.select(list(names))
    for number, field in enumerate(table.schema):
        if isinstance(field.type, pa.BaseExtensionType):
            chunks = [_without_tensors(chunk) for chunk in table.column(number).chunks]
            kind = chunks[0].type if chunks else field.type
            table = table.set_column(number, field.name, pa.chunked_array(chunks, kind))
    return table


def _without_tensors(values: pa.ExtensionArray) -> pa.Array:
    """Tensors as lists; what is none of one or two axes stays, and is refused by its type."""
    storage = values.storage
    shape: tuple[int, ...] | None = getattr(values.type, "shape", None)
    if pa.types.is_struct(storage.type) and getattr(values.type, "ndim", 0) == 1:
        return pc.struct_field(storage, "data")
    if pa.types.is_struct(storage.type) or shape is None or len(shape) not in (1, 2):
        return values
    if len(shape) == 1:
        return storage.cast(pa.list_(storage.type.value_type, shape[0]))
    if storage.null_count:
        return values
    rows = pa.FixedSizeListArray.from_arrays(storage.flatten(), shape[1])
    return pa.LargeListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int64) * shape[0], rows)
