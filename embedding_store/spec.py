"""What a table is: frozen descriptions, validated when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from embedding_store.errors import BadSpec

__all__ = ["INITIALIZER_KINDS", "InitializerSpec", "OptimizerSpec", "TableSpec"]

INITIALIZER_KINDS = ("zeros", "ones", "constant", "uniform", "normal", "truncated_normal")

_INT64_MAX = 2**63 - 1
_WEIGHT_DTYPES = ("float32",)


@dataclass(frozen=True, slots=True)
class InitializerSpec:
    """A distribution of initial values.

    Attributes:
        kind: One of `INITIALIZER_KINDS`.
        a: `constant`: the value; `uniform`: low; normal kinds: mean.
        b: `uniform`: high; normal kinds: standard deviation (of the
            untruncated normal, which is cut at two of them, as in Keras).
    """

    kind: str = "uniform"
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in INITIALIZER_KINDS:
            raise BadSpec(f"initializer kind {self.kind!r}: known kinds are {', '.join(INITIALIZER_KINDS)}")
        if not (math.isfinite(self.a) and math.isfinite(self.b)):
            raise BadSpec(f"initializer {self.kind}: parameters must be finite, got a={self.a}, b={self.b}")
        if self.kind == "uniform" and self.a > self.b:
            raise BadSpec(f"initializer uniform: low {self.a} is above high {self.b}")
        if self.kind in ("normal", "truncated_normal") and self.b < 0:
            raise BadSpec(f"initializer {self.kind}: standard deviation {self.b} is negative")


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer by name, with hyperparameters under Keras' own names.

    Attributes:
        name: A fused optimizer ("sgd", "adagrad", "adam", ...), or "keras" for
            any other Keras optimizer, run on the gathered block of rows.
        hyperparameters: Sorted pairs (name, value); booleans are 0.0 or 1.0.
            `learning_rate` is the default where a commit names none.
        keras_config: JSON of `keras.optimizers.serialize`, for "keras" only.
    """

    name: str = "sgd"
    hyperparameters: tuple[tuple[str, float], ...] = (("learning_rate", 0.01),)
    keras_config: str = ""

    @classmethod
    def of(cls, name: str, **hyperparameters: float) -> OptimizerSpec:
        """The spec of a fused optimizer, `OptimizerSpec.of("adagrad", learning_rate=0.1)`."""
        return cls(name, tuple(sorted((key, float(value)) for key, value in hyperparameters.items())))

    def get(self, name: str, default: float) -> float:
        """The hyperparameter `name`, or `default` where the spec has none."""
        return dict(self.hyperparameters).get(name, default)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table: its name, shape, initial values and optimizer.

    Attributes:
        name: Unique in a store; letters, digits and `._-/`, at most 200 of them.
        dim: Values in a row, at least 1.
        vocabulary_size: Ids are `0 <= id < vocabulary_size`; None: any int64.
        dtype: Of the weights. Slots are always float32.
        initializer: Distribution of the rows that were never updated.
        seed: Of the initial values.
        optimizer: How gradients become rows.
    """

    name: str
    dim: int
    vocabulary_size: int | None = None
    dtype: str = "float32"
    initializer: InitializerSpec = field(default_factory=lambda: InitializerSpec("uniform", -0.05, 0.05))
    seed: int = 0
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 200 or not all(c.isalnum() or c in "._-/" for c in self.name):
            raise BadSpec(f"table name {self.name!r}: use 1 to 200 letters, digits, '.', '_', '-' or '/'")
        if not isinstance(self.dim, int) or not 1 <= self.dim <= 65_536:
            raise BadSpec(f"table {self.name!r}: dim must be an integer from 1 to 65536, got {self.dim!r}")
        size = self.vocabulary_size
        if size is not None and not (isinstance(size, int) and 1 <= size <= _INT64_MAX):
            raise BadSpec(f"table {self.name!r}: vocabulary_size must be None or a positive integer, got {size!r}")
        if self.dtype not in _WEIGHT_DTYPES:
            raise BadSpec(f"table {self.name!r}: dtype {self.dtype!r}; known dtypes are {', '.join(_WEIGHT_DTYPES)}")
        if not -(2**63) <= self.seed <= _INT64_MAX:
            raise BadSpec(f"table {self.name!r}: seed {self.seed} does not fit in int64")

    def differences(self, other: TableSpec) -> Mapping[str, tuple[object, object]]:
        """The fields in which two specs differ: name -> (ours, theirs)."""
        names = ("name", "dim", "vocabulary_size", "dtype", "initializer", "seed", "optimizer")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
