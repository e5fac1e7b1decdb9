"""A pin of a store server, whose owner has its rows saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.shards.shard_store import RowSave, SavedRows, ServedRows
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.client.remote_store import RemotePin

__all__ = ["ShardPin"]


class ShardPin(RemotePin, ServedRows):
    """As `RemotePin`.

    Args:
        connection, look_up, specs, version, lease_s: As of `RemotePin`.
        save_rows: Has the server save the rows of the pin of a token.
    """

    def __init__(
        self,
        connection: ServerConnection,
        look_up: Callable[[Mapping[str, Int64], bytes], dict[str, Float32]],
        specs: Callable[[], dict[str, TableSpec]],
        version: int | None,
        lease_s: float,
        save_rows: Callable[[RowSave, bytes], SavedRows],
    ) -> None:
        super().__init__(connection, look_up, specs, version, lease_s)
        self._save_rows = save_rows

    def save_rows(self, save: RowSave) -> SavedRows:
        self._require_open()
        return self._save_rows(save, self._token)
