"""The interface of both exchanges: rows of ids, gradients of ids, and the whole table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables import GradientPart
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.host_embeddings.exchange.gathered_ids import GatheredIds

__all__ = ["RowExchange", "rows_with_slots"]


class RowExchange(ABC):
    """A table that the members of a group look up and update together, by the same calls in the same order.

    Attributes:
        group: The replicas.
        spec: The whole table.
        dim: Columns of the gradients that this member sums, in `parts` and `apply`.
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
        """The part of everyone's gradients that this member sums.

        Args:
            batch: The lookup's ids.
            gradients: float32 `[counts[rank], whole dim]`, this member's, C-contiguous.
            scales: float32 `[replicas]`, the factor of each replica's.

        Returns:
            A part for every replica, in rank order: the ids and columns that this
            member sums, in the order of their positions.
        """

    @abstractmethod
    def apply(self, update: TableUpdate, step: int, learning_rate: float) -> None:
        """One optimizer step with the sums of `parts`."""

    @abstractmethod
    def columns_of(self, rank: int) -> slice:
        """The whole table's columns that a member sums."""

    @abstractmethod
    def kept_ids(self, rank: int) -> Int64:
        """int64, ascending: the whole table's ids that a member sums; its local ids are positions in this array."""

    @abstractmethod
    def whole(self) -> RowBlock:
        """Every row with its slots, by id, on every member."""

    @abstractmethod
    def replace(self, block: RowBlock) -> None:
        """Writes every row with its slots; `block` holds all ids in order."""

    @abstractmethod
    def close(self) -> None:
        """Frees its own memory. Closing twice is harmless."""


def rows_with_slots(store: EmbeddingStore, spec: TableSpec) -> RowBlock:
    """Every row of a store's table with a fixed vocabulary; initial values for rows never updated."""
    size = int(spec.vocabulary_size or 0)
    optimizer = row_optimizer(spec.optimizer)
    ids = np.arange(size)
    weights = store.lookup({spec.name: ids})[spec.name]
    slots = np.tile(optimizer.initial_slots(spec.dim), (size, 1))
    held = store.read_rows(spec.name, ids)
    slots[held.ids] = held.slots
    return RowBlock(ids, weights, slots)
