"""A cached source as evaluation reads it: without any effect on the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.tables.base_store import BaseSource

__all__ = ["UnpromotedSource"]


class UnpromotedSource(BaseSource):
    """Another source's rows, looked up in another way; closing this closes nothing."""

    def __init__(
        self, source: RowSource, look_up: Callable[[Mapping[str, Int64], int | None], dict[str, Float32]]
    ) -> None:
        """`look_up`: takes ids and version as `RowSource.lookup` does."""
        self._source, self._look_up = source, look_up

    def specs(self) -> dict[str, TableSpec]:
        return self._source.specs()

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        return self._look_up(ids, version)

    def version(self) -> int:
        return self._source.version()

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        return self._source.wait_for_version(version, timeout_s)

    def close(self) -> None:
        """Nothing is this source's own."""
