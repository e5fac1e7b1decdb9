"""Which server owns which hash slot, as the servers say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Reply
from elastable.embedding_store.tiers.redis.schema import HASH_SLOTS

__all__ = ["SlotMap", "address_in"]


@dataclass(frozen=True, slots=True)
class SlotMap:
    """`owners[slot]` counts in `nodes`; -1: no server owns the slot."""

    nodes: tuple[Address, ...]
    owners: Int64

    @classmethod
    def empty(cls) -> Self:
        """No server owns anything."""
        return cls((), np.full(HASH_SLOTS, -1, np.int64))

    @classmethod
    def of_one(cls, address: Address) -> Self:
        """One server owns every slot."""
        return cls((address,), np.zeros(HASH_SLOTS, np.int64))

    @classmethod
    def of_ranges(cls, ranges: Reply, asked: Address) -> Self:
        """Reads the reply to CLUSTER SLOTS; a node that does not know its own host is the one asked."""
        nodes: dict[Address, int] = {}
        owners = np.full(HASH_SLOTS, -1, np.int64)
        for first, last, (host, port, *_), *_ in ranges:
            name = (host or b"").decode(errors="replace")
            address = Address(name if name not in ("", "?") else asked.host, int(port))
            owners[first : last + 1] = nodes.setdefault(address, len(nodes))
        return cls(tuple(nodes), owners)


def address_in(line: str) -> Address:
    """The address in `ASK <slot> <host:port>`. Raises `StoreFailed` where there is none."""
    words = line.split(" ")
    host, _, port = words[2].rpartition(":") if len(words) == 3 else ("", "", "")
    if not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise StoreFailed(f"a redis server refers to another one by {line[:80]!r}, which names none")
    return Address(host, int(port))
