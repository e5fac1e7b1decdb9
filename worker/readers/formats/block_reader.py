"""The base of readers of files: columns of all files as one table, decoded in blocks, the last used ones kept."""

import re
import threading
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from itertools import chain
from typing import Self, cast

import numpy as np
import pyarrow as pa

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.pytrees import batch_arrays, gathered, named_parts, records_of
from elastable.worker.readers.batch.ragged import Leaf
from elastable.worker.readers.batch.reader import Batch, ModelInputs, Reader, checked_indices
from elastable.worker.readers.formats.arrow_columns import At, Column, ColumnChoice, Kinds, to_array
from elastable.worker.readers.formats.data_files import DataFile

Block = dict[str, Leaf]
"""Column name -> the block's records: an array, or a RaggedArray."""

Place = Callable[[int], str]
"""Number of a record in its block -> where it is, for messages: "clicks.csv, line 7"."""

Transform = Callable[[Batch], Batch]

_INTEGER = re.compile(r"[+-]?\d+")


class BlockReader(Reader):
    """Records in blocks, one block after another.

    Args:
        columns: Names of the columns in each file.
        counts: Of each file the records in each of its blocks.
        transform: Batch -> batch with the same number of records; applied to the result of `take`.
        cached_blocks: Number of decoded blocks to keep, the last used ones.

    Attributes:
        in_file: Names of the columns to read from files; those of folders' names are not among them.
        places: Of each block the numbers of its file and of the block there.
        made_with: The arguments of its class, for another process that makes it again.

    Raises:
        BadInput: no records; a column that is missing in a file or occurs twice.
    """

    made_with: tuple[tuple[object, ...], dict[str, object]]

    def __new__(cls, *given: object, **named: object) -> Self:
        made = super().__new__(cls)
        made.made_with = given, named
        return made

    def __init__(
        self,
        files: Sequence[DataFile],
        columns: Sequence[Sequence[str]],
        counts: Sequence[Sequence[int]],
        choice: ColumnChoice,
        transform: Transform | None,
        cached_blocks: int,
    ) -> None:
        self.files, self.choice, self._transform = list(files), choice, transform
        self._name = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
        _require_same_folders(files)
        self._inside = dict.fromkeys(chain.from_iterable(columns))
        folders = [key for key, _ in files[0].partitions if key not in self._inside]
        found = [[*names, *folders] for names in columns]
        every = [name for name in (*self._inside, *folders) if name not in choice.targets]
        self._all_features = every if choice.features is None else [*choice.features]
        if not self._all_features:
            raise BadInput(f"{files[0]}: no feature columns besides {', '.join(choice.targets)}")
        self._lacking = _lacking(files, found, self._all_features, choice)
        chosen = {*(choice.features or ()), *choice.targets, *choice.options}
        if missing := next((text for name, text in self._lacking.items() if name in chosen), None):
            raise BadInput(missing)
        self.counts = counts
        self.places = [(file, block) for file, of_file in enumerate(counts) for block in range(len(of_file))]
        records = list(chain.from_iterable(counts))
        if sum(records) == 0:
            raise BadInput(f"{self._name}: empty, there must be at least one record")
        if cached_blocks < 1:
            raise BadInput(f"{self._name}: cached_blocks must be at least 1, got {cached_blocks}")
        self._starts = np.concatenate([[0], np.cumsum(records)]).astype(np.int64)
        self.shuffle_block = max(records)
        self._cached_blocks = cached_blocks
        self.feed(ModelInputs())

    def feed(self, inputs: ModelInputs) -> None:
        """Reads columns as a model with these inputs wants them, from now on; nothing is decoded yet."""
        self.inputs, choice, wanted = inputs, self.choice, inputs.dtypes
        self._features = self._all_features
        if choice.features is None and not inputs.own_step and wanted:
            missing = sorted(wanted.keys() - {*self._all_features})
            if missing:
                shown = ", ".join(map(repr, self._all_features[:20]))
                raise BadInput(f"the data: no column {missing[0]!r}, which the model takes; its columns are {shown}")
            self._features = list(wanted)  # in one order, whatever the files' is
        #: Features, label and weight, each once; those in files.
        self._columns = list(dict.fromkeys([*self._features, *choice.targets]))
        self.in_file = [name for name in self._columns if name in self._inside]
        self._kinds: dict[str, Column] | None = None
        self._decoded: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    def before(self, file: int, block: int) -> int:
        """Records of a file before one of its blocks."""
        return sum(self.counts[file][:block])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def for_inputs(self, inputs: ModelInputs) -> Reader:
        """The same records, each column read as its input wants it; with a transform in between nothing changes."""
        if self._transform is not None or self.inputs == inputs:
            return self
        other = copy(self)
        other.feed(inputs)
        return other

    @abstractmethod
    def types_of(self, name: str, want: str) -> Kinds:
        """(file, Arrow type there) of a column of the files; `want` is the dtype of its input, or "".

        Raises:
            BadInput: what a file holds has no type.
        """

    @abstractmethod
    def read_block(self, file: int, block: int) -> tuple[pa.Table, Place]:
        """Reads a block of a file, with the columns of files alone; and where its records are.

        Raises:
            BadInput: the source has changed or is malformed.
        """

    def take(self, indices: Int64) -> Batch:
        """The records at `indices`.

        Raises:
            BadInput: an index out of range, a malformed block, a value that its column or the model's input does not
                hold, a transform that changes the number of records.
        """
        rows = checked_indices(indices, len(self), self._name)
        blocks = np.searchsorted(self._starts, rows, side="right") - 1
        columns = cast("Block", gathered(blocks, rows - self._starts[blocks], self._block))
        x = {name: columns[name] for name in self._features}
        return self._transformed((x, *(columns[name] for name in self.choice.targets)), rows.size)

    def _block(self, block: int) -> Block:
        with self._lock:
            if block not in self._decoded:
                self._decoded[block] = self._decode(block)
            self._decoded.move_to_end(block)
            while len(self._decoded) > self._cached_blocks:
                self._decoded.popitem(last=False)
            return self._decoded[block]

    def _decode(self, block: int) -> Block:
        if self._kinds is None:
            self._kinds = {name: self._column(name) for name in self._columns}
        file, table, place = self.files[self.places[block][0]], *self.read_block(*self.places[block])
        folders, arrays = dict(file.partitions), Block()
        for name, column in self._kinds.items():
            if name in self._inside:
                arrays[name] = to_array(table.column(name), column, At(name, place))
            if name in folders:
                values = pa.repeat(pa.scalar(folders[name], pa.string()), table.num_rows)
                of_folder = to_array(values, column, At(name, lambda _: f"{file}: the folder's name"))
                other = np.flatnonzero(arrays.setdefault(name, of_folder) != of_folder)
                if other.size:
                    value = np.asarray(arrays[name]).tolist()[other[0]]
                    raise BadInput(
                        f"{place(int(other[0]))}: column {name!r}: {value!r}, and its folder is "
                        f"{name}={folders[name]}; rename one of the two"
                    )
        return arrays

    def _column(self, name: str) -> Column:
        if name in self._lacking:
            raise BadInput(self._lacking[name])
        want = self.choice.want(name, self.inputs)
        if name in self._inside:
            kinds = self.types_of(name, want)
        else:
            kinds = [(self.files[0], self.choice.type_of(name) or _folder_type(self.files, name, want))]
        return self.choice.column(name, kinds, self.inputs, wide=self._transform is not None)

    def _transformed(self, batch: Batch, records: int) -> Batch:
        if self._transform is None:
            return batch
        try:
            made: object = self._transform(batch)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # by a line of the transform
            raise BadInput(f"{self._name}: {error}; transform takes one batch, a tuple such as (x, y)") from error
        if not isinstance(made, tuple) or not 1 <= len(made) <= 3:
            raise BadInput(
                f"{self._name}: transform returned a {type(made).__name__}; return (x, y) or (x, y, sample_weight)"
            )
        parts = batch_arrays(made)
        if records:
            found = records_of(named_parts(parts), f"{self._name}: transform")
            if found != records:
                raise BadInput(f"{self._name}: transform made {found} records of {records}; it must keep their number")
        return parts


def _lacking(
    files: Sequence[DataFile], columns: Sequence[Sequence[str]], features: Sequence[str], choice: ColumnChoice
) -> dict[str, str]:
    """Name of each column that a file lacks, or has twice -> the message that says so."""
    lacking: dict[str, str] = {}
    wanted = list(dict.fromkeys([*features, *choice.targets, *choice.options]))
    counts = [Counter(found) for found in columns]
    for file, found, count in zip(files, columns, counts, strict=True):
        for name in wanted:
            if not count[name]:
                holder = next((other for other, names in zip(files, counts, strict=True) if names[name]), None)
                shown = ", ".join(map(repr, found[:20])) + (f", ... ({len(found)})" if len(found) > 20 else "")
                hint = f"; {holder} has it: all files need it, or leave it out by features=" if holder else ""
                lacking.setdefault(name, f"{file}: no column {name!r}; its columns are {shown}{hint}")
            elif count[name] > 1:
                message = f"{file}: {count[name]} of its columns are called {name!r}; rename all but one"
                lacking.setdefault(name, message)
    return lacking


# Folders named `key=value`, as in Hive


def _require_same_folders(files: Sequence[DataFile]) -> None:
    """Raises `BadInput` where the keys of the `key=value` folders differ from file to file."""
    keys = [key for key, _ in files[0].partitions]
    for file in files:
        found = [key for key, _ in file.partitions]
        if found != keys:
            raise BadInput(
                f"{file}: its folders name {', '.join(found) or 'no column'}, those of {files[0]} "
                f"{', '.join(keys) or 'none'}; all files of a data set must have the same"
            )


def _folder_type(files: Sequence[DataFile], key: str, want: str) -> pa.DataType:
    """Arrow type of a folder's values: as the model's input wants it, else int64 if all are integers."""
    if want.startswith(("float", "bfloat")):
        return pa.float64()
    values = [(file, value) for file in files if (value := dict(file.partitions)[key]) is not None]
    if want == "string" or not values or not all(_INTEGER.fullmatch(value) for _, value in values):
        return pa.string()
    for file, value in values:  # Python makes no numbers of thousands of digits
        if len(value) > 4_000 or not -(2**63) <= int(value) < 2**63:
            raise BadInput(f"{file}: folder {key}={value[:40]}: beyond int64; say column_types={{{key!r}: 'string'}}")
    return pa.int64()
