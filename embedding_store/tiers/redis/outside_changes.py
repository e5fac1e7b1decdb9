"""Rows put or deleted outside commits: for a version that is pinned they leave before-images, as a commit does."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.tiers.redis.before_images import Moment, before_bytes, encode_before
from elastable.embedding_store.tiers.redis.block import Block
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.deletion import deletions, removal, rows_deleted
from elastable.embedding_store.tiers.redis.ledger import Kept
from elastable.embedding_store.tiers.redis.more_commands import MoreCommands
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.registry import Registry
from elastable.embedding_store.tiers.redis.resp_codec import NO_STAMP
from elastable.embedding_store.tiers.redis.row_update import block_with_slots, refuse_torn_rows, stamps_alone
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.transactions import run_transactions
from elastable.embedding_store.tiers.redis.transfer import read_block, write_block
from elastable.embedding_store.tiers.redis.writer import Writer

__all__ = ["delete_rows", "put_rows"]


def put_rows(
    topology: Topology, writer: Writer, catalog: Catalog, table: str, given: RowBlock, registry: Registry,
    deadline: Deadline,
) -> None:  # fmt: skip
    """Writes a block of rows, as they are.

    Args:
        topology: The servers.
        writer: That may write.
        catalog: All tables.
        table: The table.
        given: Checked.
        registry: As `Writer.outside_commits` gave it.
        deadline: Of everything together.
    """
    block = block_with_slots(catalog, {table: given.ids})
    more = None
    if registry.standing():
        stamps = read_block(topology, block, deadline).stamps
        more = _before(block, stamps, writer, registry, deadline, left=True)
    block.tables[table].weights[:] = given.weights
    block.tables[table].slots[:] = given.slots
    write_block(writer.topology, block, deadline, NO_STAMP, more)


def delete_rows(
    topology: Topology, writer: Writer, catalog: Catalog, table: str, ids: Int64, registry: Registry,
    deadline: Deadline,
) -> int:  # fmt: skip
    """Takes rows away; how many there were. Arguments as of `put_rows`; `ids` may repeat."""
    found = catalog.tables[table]
    if not registry.standing():
        return rows_deleted(run_transactions(writer.topology, deletions(catalog, found, ids), deadline))
    block = block_with_slots(catalog, {table: np.unique(ids)})
    stamps = read_block(topology, block, deadline).stamps
    refuse_torn_rows(block.tables[table])
    before = _before(block, stamps, writer, registry, deadline, left=False)
    removals = [_removals(block, command) for command in range(len(block.weights))]
    write_block(writer.topology, stamps_alone(block), deadline, stamps, before.and_then(removals))
    return len(block.tables[table].ids) - len(block.tables[table].missing())


def _before(
    block: Block, stamps: Int64, writer: Writer, registry: Registry, deadline: Deadline, left: bool
) -> MoreCommands:
    """What leaves the rows as they are now, for the pins that stand."""
    rows, size = before_bytes(block)
    registry = writer.settle(registry, size, deadline)
    name = Moment(registry.version, registry.serial)
    writer.note(name, Kept(rows, size, registry.serial), deadline)
    return encode_before(block, stamps, name, np.zeros(len(stamps), np.bool_), left)


def _removals(block: Block, command: int) -> list[bytes]:
    """Commands that take a partition's rows out."""
    weights, slots, _ = block.catalog.names[int(block.weights["key"][command])]
    start = int(block.weights["row_at"][command])
    ids = block.ids[start : start + int(block.weights["rows"][command])]
    return [removal(weights, ids), *([removal(slots, ids)] if block.slots["width"][command] else [])]
