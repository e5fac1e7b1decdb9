"""The cost of a host embedding's step by strategy: exact bytes, modelled seconds, and the strategy chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.errors import BadSpec
from elastable.replicas.host_embeddings.exchange.gathered_ids import id_dtype

__all__ = ["Machine", "StepBytes", "bytes_per_step", "choose_strategy", "seconds_per_step"]

_HEADER_BYTES = 32  # per replica: number of ids, of samples, and the first id outside the table


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one replica sends to the others in one step: ids (with header), rows and gradients."""

    ids: int
    rows: int
    gradients: int

    @property
    def total(self) -> int:
        return self.ids + self.rows + self.gradients


@dataclass(frozen=True, slots=True)
class Machine:
    """Constants of `seconds_per_step`, measured by `benchmarks/replicas/host_embeddings.py` (docs/host-embeddings.md).

    Attributes:
        id_s: Seconds per id of all replicas, to group or sort it.
        byte_s: Seconds per byte of a row, to move and update it, both directions together.
        token_share: Extra share of time for rows that are sorted by owner and put back.
        uneven_share: Extra share of time for columns that the replicas do not divide.
        far_row_s: Seconds per uncached piece of a row, both directions together.
        cache_bytes: Cache of a replica.
        link_bytes_s: Bytes per second from one replica to the others.
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
    """What one replica sends in a lookup and its update, with remote buffers.

    With t rows of e columns, n replicas and b ids on each (on the longest, if they differ): `(32 + s b)(n - 1)` for
    ids, where s is 4 up to 2^31 rows and 8 beyond. For rows, and again for gradients: `4 b ceil(e / n)(n - 1)` by
    encoding; `4 b e (n - 1) / n` by token, if ids are spread evenly over the replicas; `4 b e (n - 1)` by token with
    `token_exchange="sums"`.

    Args:
        strategy: "TOKEN" or "ENCODING".
        rows, dim: Size of the table.
        replicas: Number of replicas.
        lookups: Ids of each replica.
        token_exchange: "rows" or "sums".
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
    """Modelled seconds of a lookup and its update; arguments as of `bytes_per_step`.

    Both strategies group all replicas' ids and move as many bytes. By token, rows are sorted by owner and put back, but
    each is accessed once; by encoding, in n pieces on n replicas, which costs time if the table exceeds the caches, and
    columns are padded if n does not divide them.
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
    """The faster strategy, for "AUTO"; the number of lookups affects both alike.

    Raises:
        BadSpec: a number below 1.
    """
    if rows < 1 or dim < 1 or replicas < 1:
        raise BadSpec(f"a strategy needs rows, columns and replicas, got {rows}, {dim} and {replicas}")
    if replicas == 1:
        return "TOKEN"
    token, encoding = (seconds_per_step(of, rows, dim, replicas, 4096, machine) for of in ("TOKEN", "ENCODING"))
    return "TOKEN" if token < encoding else "ENCODING"
