"""A table of records for tests of the tier in Redis, with rows that a sequence number decides."""

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.tier import Records, Tier, TierTable

IDS = np.arange(400, dtype=np.int64)
_WORD = (1 << 64) - 1
TABLE = TierTable("t", 16)


def checked(row_id: int, content: bytes) -> bytes:
    """A record as the schema says that it is stored: with its check, computed as `docs/redis.md` writes it."""
    key = (row_id & _WORD) * 0xD6E8FEB86659FD93 & _WORD
    key ^= key >> 32
    total = key
    for number, at in enumerate(range(0, len(content), 8)):
        word = int.from_bytes(content[at : at + 8], "little")
        mixed = word ^ (key + number * 0x9E3779B97F4A7C15 & _WORD)
        total += word + (mixed & 0xFFFFFFFF) * (mixed >> 32)
    return content + (total & _WORD or 1).to_bytes(8, "little")


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
