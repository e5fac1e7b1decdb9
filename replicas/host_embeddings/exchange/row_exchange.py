"""What both ways of a host embedding do: rows of ids in, gradients of ids out, the whole table in and out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.grouping import GradientPart
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.host_embeddings.exchange.gathered_ids import GatheredIds

__all__ = ["RowExchange", "rows_with_slots"]


class RowExchange(ABC):
    """A table that the members of a group look rows of up, and change, together.

    All members call the same methods in the same order.

    Attributes:
        group: The replicas.
        spec: The whole table.
        dim: Columns of the gradients that this member keeps, those of `parts` and `apply`.
    """

    def __init__(self, group: ReplicaGroup, spec: TableSpec) -> None:
        self.group = group
        self.spec = spec
        self.dim = spec.dim

    @abstractmethod
    def lookup(self, batch: GatheredIds) -> Float32:
        """float32 `[counts[rank], dim]`: the rows of this member's ids."""

    @abstractmethod
    def parts(self, batch: GatheredIds, gradients: Float32, scales: Float32) -> Sequence[GradientPart]:
        """What of everyone's gradients this member keeps account of.

        Args:
            batch: Of the lookup.
            gradients: float32 `[counts[rank], whole dim]`, this member's, C-contiguous.
            scales: float32 `[replicas]`, which multiply each one's.

        Returns:
            A part for every replica, in their order: ids and columns are those that
            this member keeps, in the order of their positions.
        """

    @abstractmethod
    def apply(self, update: TableUpdate, step: int, learning_rate: float) -> None:
        """One optimizer step of sums that `parts` were folded into."""

    @abstractmethod
    def columns_of(self, rank: int) -> slice:
        """The whole table's columns that a member keeps account of."""

    @abstractmethod
    def kept_ids(self, rank: int) -> Int64:
        """int64, ascending: the whole table's ids that a member keeps account of; its own ids are their places here."""

    @abstractmethod
    def whole(self) -> RowBlock:
        """Every row with its slots, by id, on every member."""

    @abstractmethod
    def replace(self, block: RowBlock) -> None:
        """Writes every row with its slots: `block` holds all ids, in order."""

    @abstractmethod
    def close(self) -> None:
        """Frees memory that is its own. Closing twice is harmless."""


def rows_with_slots(store: EmbeddingStore, spec: TableSpec) -> RowBlock:
    """Every row of a store's table of a fixed vocabulary, initial values where it was never updated."""
    size = int(spec.vocabulary_size or 0)
    optimizer = row_optimizer(spec.optimizer)
    ids = np.arange(size)
    weights = store.lookup({spec.name: ids})[spec.name]
    slots = np.tile(optimizer.initial_slots(spec.dim), (size, 1))
    held = store.read_rows(spec.name, ids)
    slots[held.ids] = held.slots
    return RowBlock(ids, weights, slots)
