"""What a step of a host embedding costs by strategy: bytes exactly, seconds by a model, and which one it chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embedding_store.errors import BadSpec
from worker.host_embeddings.gathered_ids import id_dtype

__all__ = ["StepBytes", "bytes_per_step", "choose_strategy"]

_HEADER_BYTES = 32


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What one replica sends to the others in one step, in bytes.

    Attributes:
        ids: Of a lookup, with what is said about them.
        rows: Of a lookup.
        gradients: Of its update.
    """

    ids: int
    rows: int
    gradients: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.ids + self.rows + self.gradients


def bytes_per_step(strategy: str, rows: int, dim: int, replicas: int, lookups: int) -> StepBytes:
    """What one replica sends in a lookup and its update, in remote buffers.

    With t rows of e columns, n replicas and b ids on each of them (on the
    longest, where they differ): `(32 + s b)(n - 1)` for ids, s being 4 up to
    2^31 rows and 8 beyond; and for rows as for gradients `4 b e (n - 1)` by
    token, `4 b ceil(e / n) (n - 1)` by encoding.

    Args:
        strategy: "TOKEN" or "ENCODING".
        rows, dim: Of the table.
        replicas: That share it.
        lookups: Ids of each replica.
    """
    columns = dim if strategy == "TOKEN" else -(-dim // replicas)
    values = 4 * lookups * columns * (replicas - 1)
    ids = (_HEADER_BYTES + np.dtype(id_dtype(rows)).itemsize * lookups) * (replicas - 1)
    return StepBytes(ids, values, values)


def choose_strategy(rows: int, dim: int, replicas: int) -> str:
    """What "AUTO" takes."""
    if rows < 1 or dim < 1 or replicas < 1:
        raise BadSpec(f"a strategy needs rows, columns and replicas, got {rows}, {dim} and {replicas}")
    return "TOKEN"
