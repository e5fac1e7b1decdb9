"""Reads a store that an earlier release wrote to Redis, for `elastable store upgrade`. Nothing here writes rows.

Earlier releases kept weights and slots in separate hashes, and what a commit had changed as it was before:

    key                type    field -> value
    {N}:tables         hash    table name -> JSON {"partitions": P, "spec": {...}}
    {N}:version        string  the version in decimal; absent before the first commit
    {N}:records        hash    version in decimal -> `Commit.record`, of the current version and the one before
    {N}:serial         string  how often a change outside commits began or ended, in decimal
    {N}:pins           hash    pinned versions
    {N}:before         hash    version in decimal -> "<rows> <bytes> <serial>" of the before-images of its commit
    {N:T:p}:weights    hash    id, 8 bytes -> weights in the table's dtype; "version" -> stamp, int64: the last
                               version that changed the partition
    {N:T:p}:slots      hash    id, 8 bytes -> slots, float32
    {N:T:p}:before     hash    W, K, int64 each -> what the commit of version W found (K = 0): old stamp, h, a, l,
                               int64 each; ids of h rows that there were and of a rows that there were not, int64
                               each; h rows as in weights. W, K and "s" -> h rows as in slots

A commit changed partition by partition and set the version last. So a partition with a later stamp is of a commit that
broke off, and reads as its before-image says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.malformed import MALFORMED, Document
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.spec_json import spec_from_json
from elastable.embedding_store.errors import StaleVersion, StoreBroken
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command, Reply
from elastable.embedding_store.tiers.redis.connections.topology import Topology
from elastable.embedding_store.tiers.redis.schema import check_partitions

__all__ = ["EarlierRedis", "EarlierRedisTable", "earlier_tables", "registry_key"]

_STAMP = b"version"
_HEAD_WORDS = 4
_SCAN_COUNT = 10_000  # fields of one HSCAN, about

_Rows = dict[bytes, tuple[bytes, bytes]]
"""Rows of a partition: id, 8 bytes -> weights and slots."""


def registry_key(namespace: str) -> bytes:
    """The registry of tables: what says that a namespace holds a store of an earlier release."""
    return f"{{{namespace}}}:tables".encode()


def earlier_tables(topology: Topology, namespace: str, deadline: Deadline) -> int:
    """How many tables of an earlier release there are in a namespace."""
    key = registry_key(namespace)
    return int(topology.call([(key, ("HLEN", key))], deadline)[0])


@dataclass(frozen=True, slots=True)
class EarlierRedisTable:
    """A table in the registry of an earlier release.

    Attributes:
        spec: The table.
        partitions: How many.
        slot_bytes: Of each row.
    """

    spec: TableSpec
    partitions: int
    slot_bytes: int

    @classmethod
    def of(cls, text: bytes) -> EarlierRedisTable:
        """From the registry's value. Raises `StoreBroken` where it is something else."""
        try:
            fields: Document = json.loads(text)
            spec, partitions = spec_from_json(json.dumps(fields["spec"])), check_partitions(int(fields["partitions"]))
        except MALFORMED as error:
            raise StoreBroken(f"the registry of tables holds {text[:200]!r}, no table: {error}") from error
        return cls(spec, partitions, 4 * row_optimizer(spec.optimizer).slot_width(spec.dim))


class EarlierRedis:
    """The store of an earlier release at one version: the current one, or the one before where that can be read.

    Nobody may write to it meanwhile.
    """

    def __init__(
        self,
        topology: Topology,
        namespace: str,
        seconds: float,
        version: int | None = None,
        registry: bytes | None = None,
    ) -> None:
        """Reads what there is.

        Args:
            topology: The servers.
            namespace: Of the store.
            seconds: Deadline of each round of requests.
            version: To read; None: the current one.
            registry: The key of the registry, where it was renamed; None: its own.

        Raises:
            StoreBroken: the registry is corrupt.
            StaleVersion: the store cannot be read at that version.
        """
        self._topology, self._namespace, self._seconds = topology, namespace, seconds
        key = registry_key(namespace) if registry is None else registry
        found = self._call([(key, ("HGETALL", key)), (key, ("GET", self._key("version")))])
        tables = sorted(map(EarlierRedisTable.of, found[0][1::2]), key=lambda table: table.spec.name)
        self.tables: Mapping[str, EarlierRedisTable] = {table.spec.name: table for table in tables}
        self.current = _number(found[1], "version")
        self.version = self.current if version is None else version
        if self.version != self.current:
            self._require_previous()

    def record(self) -> bytes | None:
        """`Commit.record` of the version; None: it had none."""
        key = self._key("records")
        found = self._call([(key, ("HGET", key, str(self.version)))])[0]
        return None if found is None else bytes(found)

    def rows(self, table: str, block_rows: int = 65_536) -> Iterator[tuple[Int64, UInt8]]:
        """Every row of a table: ids int64 `[n]`, and uint8 `[n, weight_bytes + slot_bytes]`, weights first.

        Raises:
            StoreBroken: a partition is lost, or a commit broke off in it and cannot be taken back.
        """
        found = self.tables[table]
        for partition in range(found.partitions):
            rows = self._partition(found, partition)
            fields = sorted(rows)
            for start in range(0, len(fields), block_rows):
                some = fields[start : start + block_rows]
                ids = np.frombuffer(b"".join(some), "<i8").astype(np.int64)
                content = b"".join(part for field in some for part in rows[field])
                yield ids, np.frombuffer(content, np.uint8).reshape(len(some), -1)

    def keys(self, table: str) -> list[tuple[bytes, ...]]:
        """All keys of a table's rows, those of each partition together."""
        kinds = ("weights", "slots", "before")
        return [
            tuple(self._partition_key(table, partition, kind) for kind in kinds)
            for partition in range(self.tables[table].partitions)
        ]

    def other_keys(self) -> list[bytes]:
        """The keys of the store besides the registry, the owner's and those of tables."""
        return [self._key(name) for name in ("version", "records", "serial", "pins", "before")]

    def _partition(self, table: EarlierRedisTable, partition: int) -> _Rows:
        weights = self._hash(self._partition_key(table.spec.name, partition, "weights"))
        stamp = weights.pop(_STAMP, None)
        if stamp is None or len(stamp) != 8:
            raise StoreBroken(f"{self._where(table, partition)} is lost: go back to a checkpoint")
        slots = self._hash(self._partition_key(table.spec.name, partition, "slots")) if table.slot_bytes else {}
        if table.slot_bytes and slots.keys() != weights.keys():
            raise StoreBroken(
                f"{self._where(table, partition)} has lost slots of rows, or rows: go back to a checkpoint"
            )
        rows = {field: (value, slots.get(field, b"")) for field, value in weights.items()}
        sizes = (table.spec.weight_bytes, table.slot_bytes)
        if any(len(field) != 8 or tuple(map(len, row)) != sizes for field, row in rows.items()):
            raise StoreBroken(f"{self._where(table, partition)} holds fields that are no rows of {sizes} bytes")
        changed = int.from_bytes(stamp, "little", signed=True)
        while changed > self.version:
            changed = self._take_back(table, partition, changed, rows)
        return rows

    def _take_back(self, table: EarlierRedisTable, partition: int, stamp: int, rows: _Rows) -> int:
        """Makes rows those before the commit of version `stamp`; the stamp before it."""
        key = self._partition_key(table.spec.name, partition, "before")
        field = stamp.to_bytes(8, "little") + bytes(8)
        weights, slots = self._call([(key, ("HMGET", key, field, field + b"s"))])[0]
        if weights is None or (table.slot_bytes and slots is None):
            raise StoreBroken(
                f"a commit of version {stamp} broke off in {self._where(table, partition)}, and what its rows were "
                "before is gone: go back to a checkpoint"
            )
        before, absent, earlier = _before_image(weights, slots or b"", table, self._where(table, partition))
        rows.update(before)
        for one in absent:
            rows.pop(one, None)
        if earlier >= stamp:
            raise StoreBroken(f"the before-image of version {stamp} in {self._where(table, partition)} is of no use")
        return earlier

    def _require_previous(self) -> None:
        """Makes sure that the version is the one before, and that every change since can be taken back."""
        before, serial = self._key("before"), self._key("serial")
        noted, now = self._call([(before, ("HGET", before, str(self.current))), (before, ("GET", serial))])
        unchanged = noted is not None and noted.split()[-1:] == [now or b"0"]
        if self.version != self.current - 1 or self.version < 0 or not unchanged:
            raise StaleVersion(
                f"the store at {self._topology.url} is at version {self.current} and cannot be read at version "
                f"{self.version} any more"
            )

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        cursor = b"0"
        while True:
            cursor, some = self._call([(key, ("HSCAN", key, cursor, "COUNT", _SCAN_COUNT))])[0]
            found.update(zip(some[::2], some[1::2], strict=True))
            if cursor == b"0":
                return found

    def _call(self, commands: Sequence[tuple[bytes, Command]]) -> list[Reply]:
        return self._topology.call(commands, Deadline(self._seconds))

    def _key(self, name: str) -> bytes:
        return f"{{{self._namespace}}}:{name}".encode()

    def _partition_key(self, table: str, partition: int, kind: str) -> bytes:
        return f"{{{self._namespace}:{table}:{partition}}}:{kind}".encode()

    def _where(self, table: EarlierRedisTable, partition: int) -> str:
        return f"partition {partition} of table {table.spec.name!r} in redis at {self._topology.url}"


def _before_image(weights: bytes, slots: bytes, table: EarlierRedisTable, where: str) -> tuple[_Rows, list[bytes], int]:
    """Rows as they were, ids (8 bytes each) that had none, and the stamp before."""
    width, words = table.spec.weight_bytes, np.frombuffer(weights, "<i8", min(_HEAD_WORDS, len(weights) // 8))
    if len(words) == _HEAD_WORDS and (words >= 0).all():
        stamp, held, absent = (int(word) for word in words[:3])
        rows_at = 8 * (_HEAD_WORDS + held + absent)
        if len(weights) == rows_at + held * width and len(slots) == held * table.slot_bytes:
            ids = [weights[at : at + 8] for at in range(8 * _HEAD_WORDS, rows_at, 8)]
            rows = {
                ids[i]: (
                    weights[rows_at + i * width : rows_at + (i + 1) * width],
                    slots[i * table.slot_bytes : (i + 1) * table.slot_bytes],
                )
                for i in range(held)
            }
            return rows, ids[held:], stamp
    raise StoreBroken(f"a before-image in {where} is corrupt: go back to a checkpoint")


def _number(answer: object, what: str) -> int:
    try:
        if answer is None or isinstance(answer, bytes):
            return int(answer or 0)
    except ValueError:
        pass
    raise StoreBroken(f"the key of the {what} holds {answer!r:.60}, which is none")
