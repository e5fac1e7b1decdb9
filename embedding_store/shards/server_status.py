"""What a store server says of itself, and what a job's master knows of each of its store servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.measures.values import Histogram

__all__ = ["ServerStatus", "ShardStatus", "shard_status"]


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard, as its store server describes it.

    Attributes:
        version: Of its rows.
        rows: Of all its tables.
        bytes: Memory of these rows, where the store knows.
        wanted_rows: Rows that lookups asked a store with a tier for.
        read_rows: Of these, rows that were not in memory and came from the tier.
        flush_lag: Versions that the tier is behind.
        log_bytes: Bytes of the log that the tier does not make superfluous.
        pushed_bytes: Gradients that it keeps for the next version.
        failure: Why the last write to the tier failed; "": it did not.
        store: Where its rows are: a URL without a login; "": it does not say.
        commits: Seconds of its commits by phase, as of `StoreMeasures`.
    """

    version: int = 0
    rows: int = 0
    bytes: int = 0
    wanted_rows: int = 0
    read_rows: int = 0
    flush_lag: int = 0
    log_bytes: int = 0
    pushed_bytes: int = 0
    failure: str = ""
    store: str = ""
    commits: Mapping[str, Histogram] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Part of the wanted rows that were in memory; None: none was asked for."""
        return max(0.0, 1.0 - self.read_rows / self.wanted_rows) if self.wanted_rows else None


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One store server of a job, as its master sees it.

    Attributes:
        address: host:port.
        shard: What it said last; None: nothing yet.
        waited_s: Seconds that the job has been waiting for it now; 0: nobody waits for it.
        failure: Why it gave no answer when it was asked last; "": it did.
    """

    address: str
    shard: ShardStatus | None = None
    waited_s: float = 0.0
    failure: str = ""


def shard_status(store: EmbeddingStore, pushed_bytes: int, url: str = "") -> ShardStatus:
    """Of the store of a server, at `url`, that keeps `pushed_bytes` of gradients.

    Raises:
        ElastableError: the store cannot be asked.
    """
    tables = [store.table_statistics(name) for name in store.specs()]
    measures, flush = store.measures(), store.flush_status()
    return ShardStatus(
        version=store.version(),
        rows=sum(table.rows for table in tables),
        bytes=sum(table.bytes or 0 for table in tables),
        wanted_rows=sum(measures.rows_wanted.values()),
        read_rows=sum(measures.rows_read.values()),
        flush_lag=flush.version - flush.flushed_version if flush is not None else 0,
        log_bytes=flush.log_bytes if flush is not None else 0,
        pushed_bytes=pushed_bytes,
        failure=(flush.failure or "") if flush is not None else "",
        store=url,
        commits=measures.commits,
    )
