"""Stores with a tier, as tests want them: few frames, and rows that are written all the time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from elastable.embedding_store import EmbeddingStore, MemoryStore
from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine import table_rows
from elastable.embedding_store.engine.store_tier import StoreTier
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.file_log import FileLog


def tiered_store(
    tier: Tier,
    log: Log,
    budget: int,
    *,
    every_s: float = 1e6,
    log_bytes: int = 1 << 30,
    direct_bytes: int = 100,
    timeout_s: float = 60.0,
    closing_s: float = 0.0,
    threads: int = 1,
) -> MemoryStore:
    """A store that closes its tier and its log; it writes rows behind only on request, or when it has to."""
    with ExitStack() as stack:
        stack.enter_context(tier)
        stack.enter_context(log)
        store = stack.enter_context(MemoryStore(threads, direct_bytes=direct_bytes))
        store.keep_tier(
            StoreTier(tier, log, budget), log_bytes=log_bytes, every_s=every_s, timeout_s=timeout_s, closing_s=closing_s
        )
        stack.pop_all()
    return store


def flushed(store: EmbeddingStore) -> FlushStatus:
    assert isinstance(store, MemoryStore)
    status = store.flush_status()
    assert status is not None
    return status


def crowded_store(held: ExitStack, tier: Tier, folder: Path, every_s: float = 0.005) -> MemoryStore:
    """A store that keeps no row in memory that it need not.

    It may be opened again with the same tier and folder. `held`: until when memory for rows is that short.
    """
    held.enter_context(patch.object(table_rows, "_LEAST_FRAMES", 1))
    return tiered_store(tier, FileLog(folder, fsync="never"), 1, every_s=every_s, direct_bytes=0)


@contextmanager
def tiered_stores(make: Callable[[int], tuple[Tier, Log]], budget: int) -> Iterator[Callable[[], EmbeddingStore]]:
    """Makes empty stores, each with what `make` gives for its number; rows are written behind all the time."""
    with ExitStack() as stack:
        made = 0

        def another() -> EmbeddingStore:
            nonlocal made
            made += 1
            tier, log = make(made)
            return stack.enter_context(tiered_store(tier, log, budget, every_s=0.005, direct_bytes=1 << 20, threads=2))

        yield another
