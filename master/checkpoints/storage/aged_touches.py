"""What became of the touches of a table's rows between two checkpoints, where no commit changed the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastable.embedding_store.contract.row_data import NEXT_VERSION, RowBlock
from elastable.embedding_store.contract.spec import TableSpec

__all__ = ["AgedTouches"]


@dataclass(frozen=True, slots=True)
class AgedTouches:
    """Of a table with eviction, from one checkpoint to the next.

    Attributes:
        first: The first version in which the table took part (was not frozen); None: it was frozen in all of them.
        counted: Whether an eviction has begun to count anew how often rows are touched.
    """

    first: int | None = None
    counted: bool = False

    @classmethod
    def of_trained(cls, spec: TableSpec, before: int, version: int) -> AgedTouches:
        """Of a table that was not frozen in any version from `before` + 1 to `version`."""
        every = 1 if spec.eviction is None else spec.eviction.every
        return cls(before + 1 if version > before else None, version // every > before // every)

    def then(self, newer: AgedTouches) -> AgedTouches:
        """Of both times together, this one first."""
        return AgedTouches(newer.first if self.first is None else self.first, self.counted or newer.counted)

    def age(self, block: RowBlock) -> RowBlock:
        """Rows that no commit changed meanwhile, as they are at the end."""
        if block.touches is None:
            return block
        touches = block.touches.copy()
        if self.first is not None:
            touches[touches[:, 0] == NEXT_VERSION, 0] = self.first
        if self.counted:
            touches[:, 1] = 0
        return replace(block, touches=touches)
