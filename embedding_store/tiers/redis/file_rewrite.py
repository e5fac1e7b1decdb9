"""Redis' append-only file after a store is closed: rewritten where most of it is entries that were trimmed since."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from elastable.embedding_store.errors import StoreFailed, Unavailable
from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.topology import Topology

__all__ = ["LEAST_BYTES", "ask_for_rewrites"]

LEAST_BYTES = 64 << 20
"""Of a file that is worth it."""

_TIMES = 1.2  # the bytes of all data in memory, of which a rewritten file has about 0.6
_LONGEST_S = 5.0
_LOG = logging.getLogger(__name__)


def ask_for_rewrites(topology: Topology) -> int:
    """Has every server rewrite its append-only file, in the background, that has grown far beyond its data.

    Servers rewrite files by themselves as they grow (`auto-aof-rewrite-percentage`), but then the log is at its
    longest, and with the last flush no write comes any more that would make them do it again.

    Returns:
        How many servers have begun. One that cannot be asked, or does not allow it, is none.
    """
    begun = 0
    deadline = Deadline(min(topology.url.deadline, _LONGEST_S))
    with suppress(StoreFailed, Unavailable):
        for address in topology.nodes():
            told = topology.call_at(address, [("INFO", "persistence"), ("INFO", "memory")], deadline)
            if not all(isinstance(answer, bytes) for answer in told) or not _is_worth_it(_fields(b"\r\n".join(told))):
                continue
            (answer,) = topology.call_at(address, [("BGREWRITEAOF",)], deadline)
            if isinstance(answer, bytes):
                begun += 1
            else:
                _LOG.info("the append-only file of redis at %s is not rewritten: %s", address, answer)
    return begun


def _fields(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    return {name: value for name, _, value in lines}


def _is_worth_it(info: Mapping[str, str]) -> bool:
    try:
        size, data = int(info.get("aof_current_size", "0")), int(info.get("used_memory_dataset", "0"))
    except ValueError:
        return False
    busy = info.get("aof_rewrite_in_progress") != "0" or info.get("aof_rewrite_scheduled") != "0"
    return info.get("aof_enabled") == "1" and not busy and size >= max(LEAST_BYTES, _TIMES * data)
