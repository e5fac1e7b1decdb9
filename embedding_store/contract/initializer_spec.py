"""Initializers of tables: kinds, and those whose spread depends on the table's shape (Glorot, He, LeCun)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastable.embedding_store.errors import BadSpec

__all__ = [
    "INITIALIZER_KINDS",
    "SCALED_INITIALIZERS",
    "TRUNCATION",
    "InitializerSpec",
    "scaled_distribution",
    "variance_scaling",
]

INITIALIZER_KINDS = ("zeros", "ones", "constant", "uniform", "normal", "truncated_normal")
_ALIASES = {"random_uniform": ("uniform", -0.05, 0.05), "random_normal": ("normal", 0.0, 0.05)}

#: Keras draws a truncated normal from a wider one, so that its standard
#: deviation after the cut at two sigma is the one asked for.
TRUNCATION = 0.87962566103423978

_SCALED = {
    "glorot_uniform": (1.0, "fan_avg", "uniform"),
    "glorot_normal": (1.0, "fan_avg", "truncated_normal"),
    "he_uniform": (2.0, "fan_in", "uniform"),
    "he_normal": (2.0, "fan_in", "truncated_normal"),
    "lecun_uniform": (1.0, "fan_in", "uniform"),
    "lecun_normal": (1.0, "fan_in", "truncated_normal"),
}

SCALED_INITIALIZERS = tuple(_SCALED)
"""Kinds whose distribution is known once the table's shape is."""


def variance_scaling(scale: float, mode: str, distribution: str, rows: float, dim: int) -> tuple[str, float, float]:
    """What Keras' `VarianceScaling` draws a table from, as kind, a and b of an `InitializerSpec`.

    Args:
        scale: As in Keras.
        mode: "fan_in", "fan_out" or "fan_avg". The fans of a table are, as Keras
            reckons them for any matrix, its rows (in) and its columns (out).
        distribution: "uniform", "truncated_normal" or "untruncated_normal".
        rows: Size of the vocabulary.
        dim: Columns.
    """
    fan = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}[mode]
    variance = scale / max(1.0, fan)
    if distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return "uniform", -limit, limit
    if distribution == "truncated_normal":
        return "truncated_normal", 0.0, math.sqrt(variance) / TRUNCATION
    return "normal", 0.0, math.sqrt(variance)


def scaled_distribution(kind: str, rows: float, dim: int) -> tuple[str, float, float]:
    """The distribution that a kind of `SCALED_INITIALIZERS` means for a table, as kind, a and b."""
    return variance_scaling(*_SCALED[kind], rows, dim)


@dataclass(frozen=True, slots=True)
class InitializerSpec:
    """A distribution of initial values.

    Attributes:
        kind: One of `INITIALIZER_KINDS`, or of `SCALED_INITIALIZERS` (Glorot, He, LeCun), which the
            `TableSpec` replaces by the distribution that its shape makes of it. "random_uniform" and
            "random_normal" are Keras' names of "uniform" and "normal", and without a and b its defaults.
        a: `constant`: the value; `uniform`: low; normal kinds: mean; scaled kinds: rows to reckon with
            where the table has no vocabulary, 0 for the vocabulary's size.
        b: `uniform`: high; normal kinds: standard deviation (of the
            untruncated normal, which is cut at two of them, as in Keras).
    """

    kind: str = "uniform"
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind in _ALIASES:
            kind, a, b = _ALIASES[self.kind]
            given = (self.a, self.b) != (0.0, 0.0)
            self._become(kind, self.a if given else a, self.b if given else b)
        if self.kind not in (*INITIALIZER_KINDS, *SCALED_INITIALIZERS):
            known = ", ".join((*INITIALIZER_KINDS, *_ALIASES, *SCALED_INITIALIZERS))
            raise BadSpec(f"initializer kind {self.kind!r}: known kinds are {known}")
        if not (math.isfinite(self.a) and math.isfinite(self.b)):
            raise BadSpec(f"initializer {self.kind}: parameters must be finite, got a={self.a}, b={self.b}")
        if self.kind == "uniform" and self.a > self.b:
            raise BadSpec(f"initializer uniform: low {self.a} is above high {self.b}")
        if self.kind in ("normal", "truncated_normal") and self.b < 0:
            raise BadSpec(f"initializer {self.kind}: standard deviation {self.b} is negative")
        if self.kind in SCALED_INITIALIZERS and (self.b != 0 or not (self.a == 0 or self.a >= 1)):
            raise BadSpec(f"initializer {self.kind}: a is a number of rows, b is not used; got a={self.a}, b={self.b}")

    def for_table(self, table: str, vocabulary_size: int | None, dim: int) -> InitializerSpec:
        """The distribution itself, also of a scaled kind.

        Raises:
            BadSpec: it scales with the size of a vocabulary that the table has not.
        """
        if self.kind not in SCALED_INITIALIZERS:
            return self
        if self.a == 0 and vocabulary_size is None:
            raise BadSpec(
                f"table {table!r}: initializer {self.kind} scales with the size of the vocabulary, and "
                "vocabulary_size=None has none; say how many rows to reckon with, "
                f"InitializerSpec({self.kind!r}, a=ROWS), "
                'or give a spread of your own, InitializerSpec("uniform", low, high)'
            )
        return InitializerSpec(*scaled_distribution(self.kind, self.a or float(vocabulary_size or 1), dim))

    def _become(self, kind: str, a: float, b: float) -> None:
        for name, value in (("kind", kind), ("a", a), ("b", b)):
            object.__setattr__(self, name, value)
