"""The rows of an increment together with those of what it builds upon: the newest first, each row once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.rows.row_blocks import chosen_rows
from elastable.master.api import Tensor
from elastable.master.checkpoints.storage.aged_touches import AgedTouches
from elastable.master.checkpoints.storage.file_threads import in_order

if TYPE_CHECKING:
    from elastable.master.checkpoints.checkpoint import Checkpoint

__all__ = ["chained_rows"]


class Read(Protocol):
    """Reads a file of a checkpoint that holds tensors of these names."""

    def __call__(self, checkpoint: Checkpoint, file: str, names: Collection[str]) -> Mapping[str, Tensor]: ...


_ROWS, _IDS = ("ids", "weights", "slots"), ("ids",)


def chained_rows(chain: Sequence[Checkpoint], table: str, read: Read) -> Iterator[RowBlock]:
    """All rows of a table.

    A row of a base counts if no newer checkpoint of the chain has it, and if
    it is on the newest list of all rows, where there is one.

    Args:
        chain: Checkpoints, the newest first; the last holds the table whole.
        table: Its name; every checkpoint of the chain has it, down to the first that is whole.
        read: Reads a file of a checkpoint; `names` of tensors must be there.
    """
    newer = _IdSet()
    live: _IdSet | None = None  # the newest list holds all that older ones could say
    aged = AgedTouches()  # from the checkpoint at hand to the newest
    for place, checkpoint in enumerate(chain):
        entry = checkpoint.manifest.tables[table]
        last = entry.whole or place == len(chain) - 1
        for tensors in in_order(partial(read, checkpoint, names=_ROWS), entry.files):
            block = RowBlock(tensors["ids"], tensors["weights"], tensors["slots"], tensors.get("touches"))
            counts = ~newer.hold(block.ids)
            if live is not None:
                counts &= live.hold(block.ids)
            if not last:
                newer.add(block.ids)
            block = block if counts.all() else chosen_rows(block, counts)
            if len(block.ids):
                yield aged.age(block)
        if last:
            return
        if entry.live is not None and live is None:
            live = _IdSet()
            for tensors in in_order(partial(read, checkpoint, names=_IDS), entry.live):
                live.add(tensors["ids"])
        before = chain[place + 1].version
        aged = (entry.aged or AgedTouches.of_trained(entry.spec, before, checkpoint.version)).then(aged)


class _IdSet:
    """Ids that were added."""

    def __init__(self) -> None:
        self._index = IdIndex()

    def add(self, ids: Int64) -> None:
        """Ids int64 `[n]`, each once; they may be there."""
        self._index.reserve(len(ids))
        self._index.claim(ids, np.empty(len(ids), np.int64))

    def hold(self, ids: Int64) -> npt.NDArray[np.bool_]:
        """bool `[n]`: which of them were added."""
        positions = np.empty(len(ids), np.int64)
        self._index.find(ids, positions)
        held: npt.NDArray[np.bool_] = positions >= 0
        return held
