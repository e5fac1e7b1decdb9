"""The Redis key schema, number 3. It is an API: whatever speaks Redis may read tables by it.

A store lives under a namespace `N` (default "elastable"), so that several jobs may share one server. A table `T` has
`P` partitions (a power of two, fixed when the table is created); the record of `id` is in partition `mixed_bits(id) &
(P - 1)`. The text in braces is the hash tag of Redis Cluster: the keys of one tag are on one node and change in one
transaction.

    key                type    field -> value
    {N}:tier:tables    hash    table name (UTF-8) -> JSON {"schema": 3, "partitions": P, "record_bytes": W,
                               "description": base64 of the engine's bytes, "dropped": true while it is deleted}
    {N}:tier:state     hash    "state" -> what the engine keeps: version, steps, specs; "check" -> its CRC-32, uint32
                               "sequence" -> the greatest stamp so far, int64 "stamps:" and the table's name -> int64
                               [P]: stamps that were acknowledged before the state was written "lost:" and the table's
                               name -> partition in decimal, which a writer found lost "damaged:" and the
                               table's name -> int64: ids whose records a writer found damaged
    {N}:owner          string  who may write: "<host>:<process>:<random>:<phase>"
    {N}:log            stream  what was changed, in order, until the records hold it; the entries are described in
                               `elastable.embedding_store.tiers.redis.stream_records`
    {N:T:p}:rows       hash    id, int64, 8 bytes -> the record, W bytes: the row's weights first, as the table's
                               dtype stores them, then the optimizer's slots, then what the engine adds; then its
                               check, uint64, by `check_of` in `elastable.embedding_store.native.record_checks`
                               "stamp", 5 bytes -> int64, 8 bytes

Numbers are little-endian. Weights of a row are `dim` numbers: 4 bytes each in a float32 table, 2 in a float16 or
bfloat16 one; of an int8 table `dim` bytes q and the row's scale, float32, number j being q[j] * scale. A reader of
weights needs the first bytes of a record only.

The stamp of a partition is 0 before its first write, and then 2^20 times the sequence number of the last log entry
whose changes its last write included, plus a number by which it is greater than the stamp of any earlier write: every
write has another one. It changes at once with the records of the partition. It exists from the creation of the table
on, in every partition, and never decreases. A partition without a stamp, or with a smaller one than the state has
recorded, was lost by the server, wholly or in part (a restart without persistence, the tail of an append-only file, an
eviction, a failover to a replica that lagged). An id without a field has no record: the row was never updated, and
reads its initial value.
"""

import re

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.number_formats import mixed_bits

SCHEMA = 3
DEFAULT_NAMESPACE = "elastable"
DEFAULT_PARTITIONS = 64
MOST_PARTITIONS = 65_536
STAMP = b"stamp"
_STAMP_BITS = 20

_NAMESPACE = re.compile(r"[A-Za-z0-9._/-]{1,100}")


def tier_tables_key(namespace: str) -> bytes:
    """The registry of tables."""
    return f"{{{namespace}}}:tier:tables".encode()


def tier_state_key(namespace: str) -> bytes:
    """The engine's state, and the stamps that it vouches for. On the same node as the registry."""
    return f"{{{namespace}}}:tier:state".encode()


def owner_key(namespace: str) -> bytes:
    """Who may write."""
    return f"{{{namespace}}}:owner".encode()


def log_key(namespace: str) -> bytes:
    """The write-ahead log. On the same node as the owner's key."""
    return f"{{{namespace}}}:log".encode()


def rows_key(namespace: str, table: str, partition: int) -> bytes:
    """The records of a partition, and its stamp."""
    return f"{{{namespace}:{table}:{partition}}}:rows".encode()


def all_rows_pattern(namespace: str) -> bytes:
    """Matches the keys of all partitions of all tables, and no others: a namespace holds no `:`, `*` or `?`."""
    return f"{{{namespace}:*}}:rows".encode()


def first_stamp(sequence: int) -> int:
    """The least stamp of writes that include the log entry `sequence`."""
    return sequence << _STAMP_BITS


def sequence_of_stamp(stamp: int) -> int:
    """The log entry up to which a write with this stamp includes changes."""
    return stamp >> _STAMP_BITS


def stamp_name(stamp: int) -> str:
    """What to call a write in messages."""
    number = stamp - first_stamp(sequence_of_stamp(stamp))
    return f"sequence {sequence_of_stamp(stamp)}" + (f" (write {number + 1})" if number else "")


def check_partitions(partitions: int) -> int:
    """`partitions` itself, if it is a power of two that a table may have."""
    if not 1 <= partitions <= MOST_PARTITIONS or partitions & (partitions - 1):
        raise BadInput(f"partitions must be a power of two from 1 to {MOST_PARTITIONS}, got {partitions}")
    return partitions


def check_namespace(namespace: str) -> str:
    """`namespace` itself, if it can be in a key."""
    if not _NAMESPACE.fullmatch(namespace):
        raise BadInput(f"namespace {namespace!r}: use 1 to 100 letters, digits, '.', '_', '-' or '/'")
    return namespace


# The partitions of ids, and ids grouped by them


@kernel
def partition_of(ids: Int64, partitions: int) -> Int64:
    """The partition of each id: int64 `[n]` -> int64 `[n]`; `partitions` is a power of two."""
    result = np.empty(len(ids), np.int64)
    mask = np.uint64(partitions - 1)
    for i in range(len(ids)):
        result[i] = np.int64(mixed_bits(np.uint64(ids[i])) & mask)
    return result


def grouped_by_partition(ids: Int64, partitions: int) -> tuple[Int64, Int64, Int64]:
    """Ids, grouped by partition: a radix sort, so order is kept within each.

    Args:
        ids: int64 `[n]`, each once.
        partitions: A power of two, at most 65536.

    Returns:
        grouped: int64 `[n]`, those of partition 0 first.
        positions: int64 `[n]`, where each of them is in `ids`.
        counts: int64 `[partitions]`.
    """
    partition = partition_of(ids, partitions)
    positions = np.argsort(partition.astype(np.uint16), kind="stable")
    return ids[positions], positions, np.bincount(partition, minlength=partitions)
