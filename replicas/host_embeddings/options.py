"""The options of a host embedding's table, compared across replicas, and the cost of a step by strategy."""

import hashlib
import numbers
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Float32
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.replicas.host_embeddings.exchanges import id_dtype
from elastable.replicas.host_embeddings.optimizer_spec import HostEmbeddingOptimizerSpec

STRATEGIES = ("TOKEN", "ENCODING", "AUTO")
REDUCTIONS = ("mean", "sum")
TOKEN_EXCHANGES = ("rows", "sums")
DTYPES = ("float32", "float16", "bfloat16")

InitialRows = str | InitializerSpec | Array | None


@dataclass(frozen=True, eq=False)
class HostTableOptions:
    """The arguments of `create_host_embedding` that all replicas must give alike, but for those of its store.

    Raises:
        BadSpec: an invalid name, shape, dtype, strategy, optimizer, initializer or reduction.
    """

    name: str
    shape: Sequence[int]
    dtype: object = np.float32
    partition_strategy: str = "TOKEN"
    optimizer_spec: HostEmbeddingOptimizerSpec | None = None
    initializer: InitialRows = None
    reduction: str = "mean"
    token_exchange: str = "rows"
    seed: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        lengths = tuple(shape) if isinstance(shape, (Sequence, np.ndarray)) and not isinstance(shape, str) else ()
        if len(lengths) != 2 or not all(isinstance(length, numbers.Integral) and length >= 1 for length in lengths):
            raise self._bad(f"shape must be [rows, columns], two positive integers, got {shape!r}")
        if not isinstance(self.optimizer_spec, HostEmbeddingOptimizerSpec | None):
            raise self._bad(
                "optimizer_spec must be a HostEmbeddingOptimizerSpec, or None for an embedding that is not trained; "
                f"got {type(self.optimizer_spec).__name__}"
            )
        for option, known in (
            ("partition_strategy", STRATEGIES),
            ("reduction", REDUCTIONS),
            ("token_exchange", TOKEN_EXCHANGES),
        ):
            if getattr(self, option) not in known:
                raise self._bad(f"{option} {getattr(self, option)!r}; known are {', '.join(known)}")
        _ = self.spec, self.rows

    @cached_property
    def spec(self) -> TableSpec:
        """The whole table."""
        rows, columns = map(int, self.shape)
        return TableSpec(
            name=self.name,
            dim=columns,
            vocabulary_size=rows,
            dtype=self._dtype(),
            initializer=self._initializer(),
            seed=self.seed,
            optimizer=OptimizerSpec() if self.optimizer_spec is None else self.optimizer_spec.optimizer,
        )

    @cached_property
    def rows(self) -> Float32 | None:
        """float32 `[rows, columns]`: the initial rows, if they were given as an array."""
        given = self.initializer
        if not isinstance(given, np.ndarray):
            return None
        wanted = [self.spec.vocabulary_size, self.spec.dim]
        if list(given.shape) != wanted or given.dtype.kind not in "fiu":
            raise self._bad(f"initial rows must be numbers {wanted}, got {given.dtype} {list(given.shape)}")
        return np.ascontiguousarray(given, np.float32)

    def strategy(self, replicas: int) -> str:
        """ "TOKEN" or "ENCODING", chosen by the cost model for "AUTO"."""
        if self.partition_strategy != "AUTO":
            return self.partition_strategy
        # An optimizer that looks across columns must gather its sums once more where columns are split.
        if row_optimizer(self.spec.optimizer).cross_column:
            return "TOKEN"
        return choose_strategy(int(self.shape[0]), self.spec.dim, replicas)

    def described(self) -> dict[str, object]:
        """The JSON values that replicas must agree on, by name."""
        rows = self.rows
        optimizer = {"optimizer": None} if self.optimizer_spec is None else self.optimizer_spec.described()
        return {
            "name": self.name,
            "shape": [int(length) for length in self.shape],
            "dtype": self.spec.dtype,
            "partition_strategy": self.partition_strategy,
            "initializer": asdict(self.spec.initializer) if rows is None else hashlib.blake2b(rows.data).hexdigest(),
            "seed": self.seed,
            "reduction": self.reduction,
            "token_exchange": self.token_exchange,
            **optimizer,
        }

    def _dtype(self) -> str:
        name = getattr(self.dtype, "name", None)  # of NumPy's dtypes and TensorFlow's
        if not isinstance(name, str):
            name = self.dtype if isinstance(self.dtype, str) else getattr(self.dtype, "__name__", repr(self.dtype))
        if name not in DTYPES:
            raise self._bad(f"dtype {name!r}; known dtypes are {', '.join(DTYPES)}")
        return name

    def _initializer(self) -> InitializerSpec:
        given = self.initializer
        if isinstance(given, InitializerSpec):
            return given
        if given is None or isinstance(given, str):
            return InitializerSpec(given or "random_uniform")
        if isinstance(given, np.ndarray):
            return InitializerSpec("zeros")
        raise self._bad(
            "initializer must be the name of a kind, an InitializerSpec, or an array of the rows; got "
            f"{type(given).__name__}"
        )

    def _bad(self, why: str) -> BadSpec:
        return BadSpec(f"host embedding {self.name!r}: {why}")


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


# Constants of `seconds_per_step`, measured by `benchmarks/replicas/host_embeddings.py` (docs/host-embeddings.md).
_ID_S = 44e-9  # per id of all replicas, to group or sort it
_BYTE_S = 0.78e-9  # per byte of a row, to move and update it, both directions together
_TOKEN_SHARE = 0.10  # extra share of time for rows that are sorted by owner and put back
_UNEVEN_SHARE = 0.35  # extra share of time for columns that the replicas do not divide
_FAR_ROW_S = 42e-9  # per uncached piece of a row, both directions together
_CACHE_BYTES = 16e6  # of a replica
_LINK_BYTES_S = 5e9  # from one replica to the others


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


def seconds_per_step(strategy: str, rows: int, dim: int, replicas: int, lookups: int) -> float:
    """Modelled seconds of a lookup and its update; arguments as of `bytes_per_step`.

    Both strategies group all replicas' ids and move as many bytes. By token, rows are sorted by owner and put back, but
    each is accessed once; by encoding, in n pieces on n replicas, which costs time if the table exceeds the caches, and
    columns are padded if n does not divide them.
    """
    far = max(0.0, 1.0 - _CACHE_BYTES * replicas / (4.0 * rows * dim))
    work = _ID_S * replicas + _BYTE_S * 4 * dim
    if strategy == "TOKEN":
        work = work * (1 + _TOKEN_SHARE) + far * _FAR_ROW_S
    else:
        work = work * (1 + _UNEVEN_SHARE * (dim % replicas > 0)) + far * _FAR_ROW_S * replicas
    sent = bytes_per_step(strategy, rows, dim, replicas, lookups).total
    return lookups * work + sent / _LINK_BYTES_S


def choose_strategy(rows: int, dim: int, replicas: int) -> str:
    """The faster strategy, for "AUTO"; the number of lookups affects both alike.

    Raises:
        BadSpec: a number below 1.
    """
    if rows < 1 or dim < 1 or replicas < 1:
        raise BadSpec(f"a strategy needs rows, columns and replicas, got {rows}, {dim} and {replicas}")
    if replicas == 1:
        return "TOKEN"
    token, encoding = (seconds_per_step(of, rows, dim, replicas, 4096) for of in ("TOKEN", "ENCODING"))
    return "TOKEN" if token < encoding else "ENCODING"
