"""The key schema of releases before the tiers: schema 1, which is read to be migrated to schema 2 (`schema.py`).

A store lives under a namespace `N` (default "elastable"), so that several jobs
may share one server. A table `T` has `P` partitions (a power of two, fixed when
the table is created); the row of `id` lies in partition
`mix64(id) & (P - 1)`. The text in braces is the hash tag of Redis Cluster: the
keys of one partition lie on one node and change in one transaction.

    key                type    field -> value
    {N}:tables         hash    table name (UTF-8) -> JSON {"partitions": P, "spec": {...}}
    {N}:version        string  current version in decimal; absent before the first commit
    {N}:records        hash    version in decimal -> the record of its commit; of the current version
                               and the one before it, of commits that had one
    {N}:owner          string  who may write: "<host>:<process>:<random>:<phase>", set anew by each
                               recovery when it begins (phase 0) and when it has ended (phase 1)
    {N}:serial         string  of changes outside commits (rows put or deleted), in decimal: one more
                               when such a change begins, one more when it ends
    {N}:pins           hash    token -> JSON {"version": V, "serial": K, "ends_ms": E, "lease_s": S,
                               "gone": null}; E by the server's clock, Unix milliseconds; "gone": why
                               it was given up
    {N}:before         hash    "W" or "W.K" -> "<rows> <bytes> <serial>" of the before-images that the
                               commit of version W left, or the change outside commits of serial K
                               while W was current; of the newest and of those beyond a pin
    {N:T:p}:weights    hash    id, 8 bytes -> dim numbers of the spec's dtype: 4 bytes each in a float32
                               table, 2 in a float16 or bfloat16 one; int8: dim bytes q and
                               the row's scale, float32, number j being q[j] * scale
                               "version", 7 bytes -> stamp, int64, 8 bytes
    {N:T:p}:slots      hash    id, 8 bytes -> slot_width float32, slot_width * 4 bytes
    {N:T:p}:before     hash    W and K, int64 each, 16 bytes -> what a change found here (the commit of
                               version W, K being 0, or the change of serial K while W was current):
                               old stamp, h, a, l, int64 each; ids of h rows that there were and of a
                               rows that there were not, int64 each; h rows as in weights. l is 1
                               where the change left rows, 0 where it took them away
                               W, K and "s", 17 bytes -> h rows as in slots, of tables that have slots

Ids, stamps and floats are little-endian. The stamp of a partition is the last
version that changed it, 0 before any did. It exists from the creation of the
table on, in every partition: where a reader finds none, the server has lost
the partition (a restart without persistence, an eviction), which is an error
and not an empty partition. A row is in `weights` exactly if it is in `slots`;
tables whose optimizer keeps no slots have no `slots` keys. Values of `before`
never change; a commit writes one in the transaction in which it changes the
partition, and drops those that no pin needs. A partition can be read as it was
at a pinned version: of the before-images beyond the pin's (V, K), in the order
of (W, K), the first that holds an id tells its row; where none does, the row is
as it lies in the hashes. `elastable.embedding_store.tiers.redis.before_images` encodes and
decodes them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.spec_json import spec_from_json, spec_to_json
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.schema import check_partitions

__all__ = [
    "STAMP_FIELD",
    "TableRecord",
    "before_key",
    "before_ledger_key",
    "pins_key",
    "records_key",
    "serial_key",
    "slots_key",
    "tables_key",
    "version_key",
    "weights_key",
]

STAMP_FIELD = b"version"


def before_key(namespace: str, table: str, partition: int) -> bytes:
    """The before-images of a partition."""
    return f"{{{namespace}:{table}:{partition}}}:before".encode()


def before_ledger_key(namespace: str) -> bytes:
    """How much is kept of each version's before-images."""
    return f"{{{namespace}}}:before".encode()


def pins_key(namespace: str) -> bytes:
    """Pinned versions, and until when."""
    return f"{{{namespace}}}:pins".encode()


def records_key(namespace: str) -> bytes:
    """The records of the newest versions."""
    return f"{{{namespace}}}:records".encode()


def serial_key(namespace: str) -> bytes:
    """How many times a change outside commits has begun or ended."""
    return f"{{{namespace}}}:serial".encode()


def slots_key(namespace: str, table: str, partition: int) -> bytes:
    """The optimizer slots of a partition."""
    return f"{{{namespace}:{table}:{partition}}}:slots".encode()


def tables_key(namespace: str) -> bytes:
    """The registry of tables."""
    return f"{{{namespace}}}:tables".encode()


def version_key(namespace: str) -> bytes:
    """The store's current version. On the same node as the registry."""
    return f"{{{namespace}}}:version".encode()


def weights_key(namespace: str, table: str, partition: int) -> bytes:
    """The weights of a partition, and its stamp."""
    return f"{{{namespace}:{table}:{partition}}}:weights".encode()


@dataclass(frozen=True, slots=True)
class TableRecord:
    """What the registry says of a table."""

    spec: TableSpec
    partitions: int

    def to_json(self) -> str:
        """The registry's value, JSON."""
        return json.dumps({"partitions": self.partitions, "spec": json.loads(spec_to_json(self.spec))}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> TableRecord:
        """Reads what `to_json` wrote. Raises `StoreFailed` where it is something else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            return cls(spec_from_json(json.dumps(fields["spec"])), check_partitions(int(fields["partitions"])))
        except MALFORMED as error:
            raise StoreFailed(f"the registry of tables holds {text[:200]!r}, no table record: {error}") from error
