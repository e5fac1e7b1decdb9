"""Whether a server is still the one it was: started only once, and never replaced by its replica meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command

__all__ = ["START_QUESTIONS", "server_start"]

START_QUESTIONS: Sequence[Command] = (("INFO", "server"), ("INFO", "replication"))
"""Commands whose answers `server_start` reads."""

_FIELDS = (b"run_id:", b"master_replid:")  # another one after a start; another one after a failover


def server_start(answers: Sequence[bytes]) -> bytes:
    """What changes when the server may have lost what it had; b"" where the server does not say."""
    return b" ".join(line for answer in answers for line in answer.splitlines() if line.startswith(_FIELDS))
