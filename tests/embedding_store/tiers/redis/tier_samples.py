"""A table of records for tests of the tier in Redis, with rows that a sequence number decides."""

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.tier import Records, Tier, TierTable

IDS = np.arange(400, dtype=np.int64)
TABLE = TierTable("t", 16)


def rows_of(sequence: int, ids: Int64 = IDS) -> UInt8:
    """uint8 `[n, 16]`: what these ids hold after the write of that sequence."""
    return np.random.default_rng(sequence).integers(0, 256, (len(IDS), 16), dtype=np.uint8)[ids]


def changed(sequence: int, ids: Int64 = IDS) -> list[Records]:
    return [Records("t", ids, ids, rows_of(sequence, ids))]


def begin(tier: Tier) -> None:
    tier.create(TABLE)
    tier.write(changed(1), {}, 1)


def read_back(tier: Tier, ids: Int64 = IDS) -> UInt8:
    rows = np.zeros((len(ids), 16), np.uint8)
    (missing,) = tier.read([Records("t", ids, ids, rows)])
    assert not len(missing)
    return rows
