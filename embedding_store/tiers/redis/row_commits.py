"""Commits to Redis: read and updated in memory, written partition by partition, and declared at last.

1. read: rows and slots that are not remembered, stamps, and the registry, in one round trip;
2. pins whose lease has ended, and those that would cost too much, are taken out;
3. each partition in one transaction: rows, slots, stamp, before-images;
4. version, record and ledger in one transaction.

`docs/consistency.md` says what is left where one breaks off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.errors import BadInput, StoreFailed, Unavailable
from elastable.embedding_store.rows.checks import require_update
from elastable.embedding_store.rows.commit_checks import require_numbers
from elastable.embedding_store.tiers.redis.before_images import Flags, Moment, before_bytes, encode_before
from elastable.embedding_store.tiers.redis.block import Block
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.held_rows import HeldRows
from elastable.embedding_store.tiers.redis.ledger import Kept
from elastable.embedding_store.tiers.redis.more_commands import MoreCommands
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.registry import Registry, read_registry, registry_questions
from elastable.embedding_store.tiers.redis.reply_shapes import Command
from elastable.embedding_store.tiers.redis.row_update import apply_update, block_with_slots, refuse_torn_rows
from elastable.embedding_store.tiers.redis.schema_1 import before_ledger_key, records_key, serial_key, version_key
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.transactions import run_transactions
from elastable.embedding_store.tiers.redis.transfer import Reading, read_block, write_block
from elastable.embedding_store.tiers.redis.writer import Writer

__all__ = ["RowCommits", "Staged", "dropped"]

_MOST_RECORD_BYTES = 512 << 20  # of one value, in Redis


@dataclass(frozen=True, slots=True)
class Staged:
    """A commit whose rows are updated in memory.

    Attributes:
        block: The rows.
        before: What else each partition's transaction does: the rows as they were.
        kept: How much that is.
        registry: As it was read with the rows.
    """

    block: Block
    before: MoreCommands
    kept: Kept
    registry: Registry


class RowCommits:
    """Makes commits. For one thread at a time."""

    def __init__(self, topology: Topology, namespace: str, writer: Writer, held_bytes: int = 0) -> None:
        """`held_bytes`: of memory, for rows that the next commits need not read."""
        self._held = HeldRows(held_bytes)
        self._topology, self._namespace, self._writer = topology, namespace, writer
        self._unfinished: int | None = None

    def forget(self) -> None:
        """No commit of this process is half done, and rows may not be as it left them."""
        self._unfinished = None
        self._held.forget()

    def close(self) -> None:
        """Gives back the memory of rows that are held. Closing twice is harmless."""
        self._held.close()

    def stage(self, commit: Commit, catalog: Catalog, deadline: Deadline) -> Staged | None:
        """The rows of a commit, read and updated in memory; None if it stands already."""
        if commit.record is not None and len(commit.record) > _MOST_RECORD_BYTES:
            raise BadInput(f"the record of version {commit.version} has {len(commit.record)} bytes; redis keeps at "
                           f"most {_MOST_RECORD_BYTES} in one value")  # fmt: skip
        require_numbers(commit)
        updates = {name: require_update(catalog.tables[name].spec, u) for name, u in commit.updates.items()}
        block = block_with_slots(catalog, {name: update.ids for name, update in updates.items()})
        if self._stands_already(commit, deadline):
            return None
        self._writer.require(deadline)
        reading, registry = self._read(block, deadline)
        self._writer.ownership.require(registry.owner)
        refuse_other_version(registry.version, commit.version - 1)
        _refuse_foreign_stamps(reading, commit.version)
        for rows in block.tables.values():
            refuse_torn_rows(rows)
        before, kept, registry = self._before(block, reading.stamps, commit, registry, deadline)
        for name, rows in block.tables.items():
            apply_update(rows, updates[name], commit.step, commit.learning_rates.get(name))
        return Staged(block, before, kept, registry)

    def finish(self, commit: Commit, staged: Staged | None, deadline: Deadline) -> None:
        """Writes what was staged, then the version."""
        if staged is not None:
            try:
                write_block(self._writer.topology, staged.block, deadline, commit.version, staged.before)
                self._set_version(commit, staged, deadline)
            except BaseException as error:
                self._held.forget()
                if not isinstance(error, StoreFailed | Unavailable):
                    raise
                self._unfinished = commit.version
                raise StoreFailed(
                    f"the commit of version {commit.version} broke off, partitions may have changed; "
                    f"repeat the same commit to finish it: {error}"
                ) from error
            self._held.keep(staged.block, commit.version, staged.kept.serial)
        self._unfinished = None

    def _read(self, block: Block, deadline: Deadline) -> tuple[Reading, Registry]:
        """Fills a block: with rows that are held, and with what the servers tell, which is whether those still hold."""
        while True:
            left = self._held.place(block)
            reading = read_block(self._topology, left, deadline, registry_questions(self._namespace))
            registry = Registry.of(reading.answers)
            if self._held.stands(block, reading.stamps, registry):
                return reading, registry
            self._held.forget()

    def _stands_already(self, commit: Commit, deadline: Deadline) -> bool:
        """Whether only the answer to its very last step was lost; what else a commit of ours left is taken back."""
        if self._unfinished is None:
            return False
        registry = read_registry(self._topology, self._namespace, deadline)
        if registry.version == commit.version == self._unfinished:
            self._writer.ownership.require(registry.owner)
            self._writer.load(deadline)
            return True
        self._writer.ownership.require(registry.owner)
        self._writer.recover(None, deadline)
        self._unfinished = None
        return False

    def _before(
        self, block: Block, stamps: Int64, commit: Commit, registry: Registry, deadline: Deadline
    ) -> tuple[MoreCommands, Kept, Registry]:
        """What leaves the rows as they are now; settles pins first."""
        rows, size = before_bytes(block)
        registry = self._writer.settle(registry, size, deadline)
        self._writer.purge(block.catalog, registry, deadline)
        before = encode_before(block, stamps, Moment(commit.version), dropped(stamps, registry))
        return before, Kept(rows, size, registry.serial + registry.serial % 2), registry

    def _set_version(self, commit: Commit, staged: Staged, deadline: Deadline) -> None:
        """The version stands, with its record, from one moment on."""
        version, ledger, records = (key(self._namespace) for key in (version_key, before_ledger_key, records_key))
        writer, registry = self._writer, staged.registry
        obsolete = [*writer.ledger.obsolete(registry.oldest_pin(), commit.version)]
        outdated = {old for old in writer.records if old < commit.version - 1}
        words: list[Command] = [("SET", version, commit.version)]
        words += writer.ledger.written(ledger, Moment(commit.version), staged.kept)
        words += writer.ledger.removed(ledger, obsolete)
        words += [("HDEL", records, *sorted(outdated))] if outdated else []
        words += [("HSET", records, commit.version, commit.record)] if commit.record is not None else []
        if registry.serial % 2:  # a change outside commits broke off
            words.append(("SET", serial_key(self._namespace), registry.serial + 1))
        run_transactions(writer.topology, [(version, words)], deadline)
        for name in obsolete:
            del writer.ledger.entries[name]
        writer.ledger.entries[Moment(commit.version)] = staged.kept
        writer.records = writer.records - outdated | ({commit.version} if commit.record is not None else set())


def dropped(stamps: Int64, registry: Registry) -> Flags:
    """bool `[commands]`: of which partitions no pin needs any before-image that there is.

    Where rows changed outside commits after the oldest pin, a stamp does not
    tell: those stay until the pin is gone.
    """
    oldest = registry.oldest_pin()
    told = oldest.version > registry.version or oldest.serial == registry.serial
    flags: Flags = np.logical_and(stamps <= oldest.version, told)
    return flags


def _refuse_foreign_stamps(reading: Reading, version: int) -> None:
    newest = int(reading.stamps.max(initial=0))
    if newest >= version:
        raise StoreFailed(f"a partition bears version {newest} while version {version} is committed: who else writes?")
