"""The options of a host embedding's table: validated, and compared across replicas."""

from __future__ import annotations

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
from elastable.replicas.host_embeddings.exchange.cost import choose_strategy
from elastable.replicas.host_embeddings.optimizer_spec import HostEmbeddingOptimizerSpec

__all__ = ["DTYPES", "REDUCTIONS", "STRATEGIES", "TOKEN_EXCHANGES", "HostTableOptions", "InitialRows"]

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
