"""The base of readers whose records are decoded in blocks, with a cache of decoded blocks."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.formats.arrow_columns import ColumnChoice
from elastable.worker.readers.records.pytrees import Leaf, batch_arrays, named_parts, records_of
from elastable.worker.readers.records.ragged import concatenated, taken
from elastable.worker.readers.records.reader import Batch, Reader, checked_indices

__all__ = ["Block", "BlockReader", "Transform"]

Block = dict[str, Leaf]
"""Column name -> the block's records: an array, or a RaggedArray."""

Transform = Callable[[Batch], Batch]


class BlockReader(Reader):
    """Records in blocks, one block after another.

    Args:
        counts: Records in each block.
        features: Names of the columns that make up x, a dict.
        choice: Label and weight.
        transform: Batch -> batch with the same number of records; applied to the result of `take`.
        cached_blocks: Number of decoded blocks to keep, the last used ones.
        name: What errors call this source.

    Raises:
        BadInput: no records.
    """

    def __init__(
        self,
        counts: Sequence[int],
        features: Sequence[str],
        choice: ColumnChoice,
        transform: Transform | None,
        cached_blocks: int,
        name: str,
    ) -> None:
        if sum(counts) == 0:
            raise BadInput(f"{name}: empty, there must be at least one record")
        if cached_blocks < 1:
            raise BadInput(f"{name}: cached_blocks must be at least 1, got {cached_blocks}")
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._features = list(features)
        self._choice = choice
        self._transform = transform
        self._cached_blocks = cached_blocks
        self._name = name
        self._decoded: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shuffle_block(self) -> int | None:
        """Records in the largest block."""
        return int(np.diff(self._starts).max())

    @abstractmethod
    def read_block(self, block: int) -> Block:
        """Decodes a block: column name -> array of its records.

        Raises:
            BadInput: the source has changed or is malformed.
        """

    def take(self, indices: Int64) -> Batch:
        """The records at `indices`.

        Raises:
            BadInput: an index out of range, a malformed block, a transform that changes the number of records.
        """
        rows = checked_indices(indices, len(self), self._name)
        columns = self._gather(rows)
        choice = self._choice
        x = {name: columns[name] for name in self._features}
        rest = tuple(columns[name] for name in (choice.label, choice.weight) if name is not None)
        return self._transformed((x, *rest), rows.size)

    def _gather(self, rows: Int64) -> Block:
        if rows.size == 0:
            return {name: taken(values, rows) for name, values in self._block(0).items()}
        # A stable sort by block groups the rows; `back` undoes it.
        block_of = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(block_of, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(order.size)
        blocks, counts = np.unique(block_of, return_counts=True)
        pieces: list[Block] = []
        for block, members in zip(blocks, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            decoded = self._block(int(block))
            local = rows[members] - self._starts[block]
            pieces.append({name: taken(values, local) for name, values in decoded.items()})
        return {name: taken(concatenated([piece[name] for piece in pieces]), back) for name in pieces[0]}

    def _block(self, block: int) -> Block:
        with self._lock:
            if block not in self._decoded:
                self._decoded[block] = self.read_block(block)
            self._decoded.move_to_end(block)
            while len(self._decoded) > self._cached_blocks:
                self._decoded.popitem(last=False)
            return self._decoded[block]

    def _transformed(self, batch: Batch, records: int) -> Batch:
        if self._transform is None:
            return batch
        made: object = self._transform(batch)
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
