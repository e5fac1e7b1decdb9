"""recommenders-addons (TFRA): its cuckoo table in memory, and its C++ client for Redis."""

import json
import tempfile
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from itertools import cycle
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn

_KEPT = 4  # outputs alive at once, so that none is still in a cache
_FILLED_AT_ONCE = 1 << 16
_CLUSTER = 0  # the only mode in which a table has more than one slice


def prepare(race: str, settings: workloads.Settings) -> Turn:
    """`dynamic`: lookups of the cuckoo table. `redis lookup`, `redis upsert`: of the Redis client."""
    tf.config.threading.set_intra_op_parallelism_threads(workloads.THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(workloads.THREADS)
    name = f"tensorflow-recommenders-addons {version('tensorflow-recommenders-addons')}"
    if race == "dynamic":
        ids, batches = workloads.dynamic_ids()
        table = _variable(de.CuckooHashTableCreator(), len(ids))
    else:
        ids = np.arange(settings["rows"], dtype=np.int64)
        batches = workloads.redis_ids(settings["rows"], settings["batch"])
        creator = redis_creator(settings["address"], settings["partitions"], f"of-{settings['rows']}")
        table = _variable(creator, 0)
    _fill(table, ids)
    write = race == "redis upsert"
    work = _upserts(table, batches) if write else _lookups(table, batches)
    return Turn(name, work, len(batches[0]))


def _lookups(table: de.Variable, batches: list[np.ndarray]) -> Callable[[], None]:
    @tf.function  # type: ignore[untyped-decorator]
    def look_up(ids: tf.Tensor) -> tf.Tensor:
        return table.tables[0].lookup(ids)

    turns = cycle([tf.constant(ids) for ids in batches])
    outputs: deque[object] = deque(maxlen=_KEPT)
    return lambda: outputs.append(look_up(next(turns)))


def _upserts(table: de.Variable, batches: list[np.ndarray]) -> Callable[[], None]:
    @tf.function  # type: ignore[untyped-decorator]
    def upsert(ids: tf.Tensor, rows: tf.Tensor) -> None:
        table.upsert(ids, rows)

    turns = cycle([tf.constant(ids) for ids in batches])
    rows = tf.random.normal((len(batches[0]), workloads.DIM))
    return lambda: upsert(next(turns), rows)


def _variable(creator: object, rows: int) -> object:
    return de.get_variable(
        "rows",
        key_dtype=tf.int64,
        value_dtype=tf.float32,
        dim=workloads.DIM,
        initializer=0.0,
        init_size=rows,
        devices=["/CPU:0"],
        kv_creator=creator,
    )


def redis_creator(address: str, partitions: int, tag: str) -> de.RedisTableCreator:
    """What creates a table in the Redis Cluster of one node at `address`; `tag` is part of its keys."""
    host, _, port = address.rpartition(":")
    options = {
        "redis_connection_mode": _CLUSTER,
        "redis_host_ip": [host],
        "redis_host_port": [int(port)],
        "storage_slice": partitions,
        "model_tag_import": tag,
        "model_tag_runtime": tag,
        "table_store_mode": 2,  # rows stay in Redis
        "redis_socket_timeout": 30_000,
    }
    written = Path(tempfile.mkdtemp(prefix="recommenders-")) / "redis.json"
    written.write_text(json.dumps(options))
    return de.RedisTableCreator(de.RedisTableConfig(str(written)))


def _fill(table: de.Variable, ids: np.ndarray) -> None:
    random = np.random.default_rng(1)
    for start in range(0, len(ids), _FILLED_AT_ONCE):
        some = ids[start : start + _FILLED_AT_ONCE]
        table.upsert(tf.constant(some), tf.constant(random.standard_normal((len(some), workloads.DIM), np.float32)))
