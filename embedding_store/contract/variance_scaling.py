"""Initializers whose spread comes from a table's shape: Glorot, He, LeCun, and what they are cases of."""

from __future__ import annotations

import math

__all__ = ["SCALED_INITIALIZERS", "TRUNCATION", "scaled_distribution", "variance_scaling"]

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
