"""Records in Redis through its tier, compared with redis-py's pipelined HMGET and HSET with hiredis.

16,384 rows of 64 values in 64 partitions, with Adagrad's slots next to them, on
one server that the benchmark starts: the `redis-server` on PATH, or the Valkey
of the tests. Both sides read and write the same fields of the same hashes. The
server ceiling, which no client can exceed, is measured as well.

    python -m benchmarks.storage.redis_rows
"""

from collections.abc import Callable
from itertools import count, cycle

import numpy as np
import redis

from benchmarks.harness import Row, compare, publish, rates
from benchmarks.processes import redis_server
from benchmarks.storage.redis_pace import read_pace, write_pace
from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.tier import Records, TierTable
from elastable.embedding_store.tiers.redis.record_codec import CHECK_BYTES
from elastable.embedding_store.tiers.redis.record_transfer import RecordTable
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.schema import DEFAULT_NAMESPACE, partition_of, rows_key
from elastable.embedding_store.tiers.redis.url import RedisUrl
from elastable.process.heap import keep_freed_memory

_ROWS, _DIM, _BATCH, _PARTITIONS = 262_144, 64, 16_384, 64
_WEIGHT_BYTES, _RECORD_BYTES = 4 * _DIM, 8 * _DIM
_ROUNDS = 9
_FLOOR = 0.9


def main() -> None:
    """Measures, prints and writes `results/redis_rows.json`."""
    random = np.random.default_rng(2026)
    batches = [random.choice(_ROWS, _BATCH, replace=False) for _ in range(24)]
    with (
        redis_server() as server,
        RedisTier(f"{server.url}?partitions={_PARTITIONS}") as tier,
        server.client() as client,
    ):
        tier.create(TierTable("t", _RECORD_BYTES))
        ids = np.arange(_ROWS)
        tier.write([Records("t", ids, ids, random.integers(0, 256, (_ROWS, _RECORD_BYTES), dtype=np.uint8))], {}, 1)
        url = RedisUrl.parse(server.url)
        table = RecordTable.of(DEFAULT_NAMESPACE, tier.tables()["t"], _PARTITIONS)
        rows = [*_reads(tier, client, url, table, batches), *_flushes(tier, client, url, table, batches)]
        name = client.info("server").get("server_name", "redis")
    publish("redis_rows", f"{_BATCH:,} rows x {_DIM} with slots, {_PARTITIONS} partitions, one {name} server", rows)


def _reads(tier: RedisTier, client: redis.Redis, url: RedisUrl, table: RecordTable, batches: list[Int64]) -> list[Row]:
    outputs = [np.empty((_BATCH, _RECORD_BYTES), np.uint8) for _ in range(4)]  # in rotation, so that none is in a cache

    def reading(width: int) -> Callable[[], UInt8]:
        turns, places = cycle(batches), cycle([np.ascontiguousarray(output[:, :width]) for output in outputs])

        def read() -> UInt8:
            rows, ids = next(places), next(turns)
            (missing,) = tier.read([Records("t", ids, ids, rows)])
            assert not len(missing)
            return rows

        return read

    theirs = cycle(batches)

    def read() -> UInt8:
        """The records in the order of the ids, as the tier gives them."""
        ids = next(theirs)
        pipeline = client.pipeline(transaction=False)
        order = []
        for key, positions in _by_partition(ids):
            pipeline.hmget(key, [word.tobytes() for word in ids[positions]])
            order.append(positions)
        rows = np.empty((len(ids), _RECORD_BYTES), np.uint8)
        for positions, reply in zip(order, pipeline.execute(), strict=True):
            stored = np.frombuffer(b"".join(reply), np.uint8).reshape(-1, _RECORD_BYTES + CHECK_BYTES)
            rows[positions] = stored[:, :_RECORD_BYTES]  # without their checks, which this side does not compute
        return rows

    whole = reading(_RECORD_BYTES)
    np.testing.assert_array_equal(whole(), read())
    works = {
        "ours": whole, "weights": reading(_WEIGHT_BYTES), "theirs": read, "pace": read_pace(url, table, batches)
    }  # fmt: skip
    rounds = rates(works, _BATCH, _ROUNDS)
    return [
        compare("read, against pipelined HMGET", "rows/s", rounds["ours"], rounds["theirs"]),
        compare("read, against the server ceiling", "rows/s", rounds["ours"], rounds["pace"]),
        compare("read of weights alone, against the ceiling of records", "rows/s", rounds["weights"], rounds["pace"]),
    ]


def _flushes(
    tier: RedisTier, client: redis.Redis, url: RedisUrl, table: RecordTable, batches: list[Int64]
) -> list[Row]:
    rows = np.ones((_BATCH, _RECORD_BYTES), np.uint8)
    positions = np.arange(_BATCH)
    ours, theirs, sequences = cycle(batches), cycle(batches), count(2)

    def write() -> None:
        ids = next(theirs)
        pipeline = client.pipeline(transaction=False)
        for key, places in _by_partition(ids):
            words: list[bytes] = []
            for place in places:
                words += (ids[place].tobytes(), rows[place].tobytes() + bytes(CHECK_BYTES))
            pipeline.hset(key, items=words)
        pipeline.execute()

    def flush() -> None:
        tier.write([Records("t", next(ours), positions, rows)], {}, next(sequences))

    rounds = rates({"ours": flush, "theirs": write, "pace": write_pace(url, table, batches)}, _BATCH, _ROUNDS)
    return [
        compare("flush, against pipelined HSET", "rows/s", rounds["ours"], rounds["theirs"]),
        compare("flush, against the server ceiling", "rows/s", rounds["ours"], rounds["pace"], _FLOOR),
    ]


def _by_partition(ids: Int64) -> list[tuple[bytes, Int64]]:
    """The key of every partition, and the positions of its ids."""
    partitions = partition_of(ids, _PARTITIONS)
    order = np.argsort(partitions, kind="stable")
    ends = np.cumsum(np.bincount(partitions, minlength=_PARTITIONS))
    return [
        (rows_key(DEFAULT_NAMESPACE, "t", number), positions)
        for number, positions in enumerate(np.split(order, ends[:-1]))
        if len(positions)
    ]


if __name__ == "__main__":
    keep_freed_memory()  # as every process of the `elastable` command does
    main()
