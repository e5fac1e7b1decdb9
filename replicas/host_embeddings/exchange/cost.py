"""What a step of a host embedding costs by strategy: bytes exactly, seconds by a model, and which one it chooses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.errors import BadSpec
from elastable.replicas.host_embeddings.exchange.gathered_ids import id_dtype

__all__ = ["Machine", "StepBytes", "bytes_per_step", "choose_strategy", "seconds_per_step"]

_HEADER_BYTES = 32  # what is said about ids: how many, of how many samples, and which one is outside


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


@dataclass(frozen=True, slots=True)
class Machine:
    """What `seconds_per_step` reckons with; measured by `benchmarks/host_embeddings.py` where docs/ says.

    Attributes:
        id_s: Seconds for each id of all replicas, to group or sort it.
        byte_s: Seconds for each byte of a row, to move it and step, both ways together.
        token_share: How much longer rows take that are sorted by owner and put back in place.
        uneven_share: How much longer columns take that do not divide by the replicas.
        far_row_s: Seconds to reach a piece of a row that lies in no cache, both ways together.
        cache_bytes: Of a replica; what lies beyond is far.
        link_bytes_s: Bytes in a second from one replica to the others.
    """

    id_s: float = 44e-9
    byte_s: float = 0.78e-9
    token_share: float = 0.10
    uneven_share: float = 0.35
    far_row_s: float = 42e-9
    cache_bytes: float = 16e6
    link_bytes_s: float = 5e9


def bytes_per_step(
    strategy: str, rows: int, dim: int, replicas: int, lookups: int, token_exchange: str = "rows"
) -> StepBytes:
    """What one replica sends in a lookup and its update, in remote buffers.

    With t rows of e columns, n replicas and b ids on each of them (on the
    longest, where they differ): `(32 + s b)(n - 1)` for ids, s being 4 up to
    2^31 rows and 8 beyond. For rows, and again for gradients:
    `4 b ceil(e / n)(n - 1)` by encoding; `4 b e (n - 1) / n` by token, where
    ids are spread evenly over the replicas; `4 b e (n - 1)` by token with the
    reduce-scatter of the document.

    Args:
        strategy: "TOKEN" or "ENCODING".
        rows, dim: Of the table.
        replicas: That share it.
        lookups: Ids of each replica.
        token_exchange: "rows" or "sums", as of `create_host_table`.
    """
    columns = float(dim)
    if strategy == "ENCODING":
        columns = -(-dim // replicas)
    elif token_exchange == "rows":
        columns = dim / replicas
    values = round(4 * lookups * columns * (replicas - 1))
    ids = (_HEADER_BYTES + np.dtype(id_dtype(rows)).itemsize * lookups) * (replicas - 1)
    return StepBytes(ids, values, values)


def seconds_per_step(
    strategy: str, rows: int, dim: int, replicas: int, lookups: int, machine: Machine | None = None
) -> float:
    """A model of what a lookup and its update take, in seconds.

    Both strategies group all replicas' ids and move as many bytes. By token
    rows are sorted by owner and put back, but each is reached once; by encoding
    it is reached in n pieces, on n replicas, which costs where the table
    lies outside the caches, and columns are padded where n does not divide them.

    Args:
        strategy, rows, dim, replicas, lookups: As of `bytes_per_step`.
        machine: What to reckon with.
    """
    machine = Machine() if machine is None else machine
    far = max(0.0, 1.0 - machine.cache_bytes * replicas / (4.0 * rows * dim))
    work = machine.id_s * replicas + machine.byte_s * 4 * dim
    if strategy == "TOKEN":
        work = work * (1 + machine.token_share) + far * machine.far_row_s
    else:
        work = work * (1 + machine.uneven_share * (dim % replicas > 0)) + far * machine.far_row_s * replicas
    sent = bytes_per_step(strategy, rows, dim, replicas, lookups).total
    return lookups * work + sent / machine.link_bytes_s


def choose_strategy(rows: int, dim: int, replicas: int, machine: Machine | None = None) -> str:
    """What "AUTO" takes: the strategy of fewer seconds; the number of lookups weighs on both alike.

    Args:
        rows, dim: Of the table.
        replicas: That share it.
        machine: What to reckon with.

    Raises:
        BadSpec: a number below 1.
    """
    if rows < 1 or dim < 1 or replicas < 1:
        raise BadSpec(f"a strategy needs rows, columns and replicas, got {rows}, {dim} and {replicas}")
    if replicas == 1:
        return "TOKEN"
    token, encoding = (seconds_per_step(of, rows, dim, replicas, 4096, machine) for of in ("TOKEN", "ENCODING"))
    return "TOKEN" if token < encoding else "ENCODING"
