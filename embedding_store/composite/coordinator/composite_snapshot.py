"""One version of several stores, pinned on each of them."""

from __future__ import annotations

from collections.abc import Sequence

from elastable.embedding_store.composite.coordinator.composite_reads import CompositeReads
from elastable.embedding_store.composite.splits.table_splits import TableSplits
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.errors import StaleVersion

__all__ = ["CompositeSnapshot"]


class CompositeSnapshot(CompositeReads[Snapshot]):
    """If the pin of one store is gone, reads of what that store holds raise `StaleVersion` and name the store.

    Args:
        pins: One of each store, in the order of the stores, all of the same version; closed with this one.
        splits: Which store holds which part of a table.
        version: The pinned version.
        timeout_s: As of `CompositeSource`.
    """

    def __init__(self, pins: Sequence[Snapshot], splits: TableSplits, version: int, timeout_s: float) -> None:
        super().__init__(pins, splits, timeout_s)
        self._version = version

    def version(self) -> int:
        return self._version

    def renew(self, lease_s: float | None = None) -> None:
        self._require_open()
        self._each(lambda pin: pin.renew(lease_s))

    def close(self) -> None:
        """Frees the version on every store; on one that cannot be reached the lease runs out."""
        if not self._closed:
            self._closed = True
            try:
                self._each(lambda pin: pin.close())
            finally:
                self._calls.close()

    def _require_open(self) -> None:
        if self._closed:
            raise StaleVersion(f"the pin of version {self._version} is gone: it was released")
