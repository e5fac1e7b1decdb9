"""Reading a store from outside of the process that writes it: flushed rows, or, by its log, the newest ones."""

from __future__ import annotations

from elastable.embedding_store.readers.store_reader import ReaderStatus, StoreReader

__all__ = ["ReaderStatus", "StoreReader"]
