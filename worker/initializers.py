"""Keras initializers as distributions of a store's initial values."""

from __future__ import annotations

import math
from typing import Any

import keras

from embedding_store.errors import Unsupported
from embedding_store.spec import InitializerSpec

__all__ = ["initializer_spec", "seed_of"]

#: Keras draws a truncated normal and widens it so that its standard deviation
#: after the cut at two sigma is the one asked for (He et al. 2015 as in Keras).
_TRUNCATION = 0.87962566103423978


def initializer_spec(layer: str, initializer: Any, vocabulary_size: int | None, dim: int) -> InitializerSpec:
    """The distribution that a Keras initializer draws `[vocabulary_size, dim]` from.

    Raises:
        Unsupported: an initializer that is no distribution by (id, column), or
            one scaled by the vocabulary of a table that has none.
    """
    kinds = keras.initializers
    exact = type(initializer)
    if exact is kinds.Zeros:
        return InitializerSpec("zeros")
    if exact is kinds.Ones:
        return InitializerSpec("ones")
    if exact is kinds.Constant:
        return InitializerSpec("constant", float(initializer.value))
    if exact is kinds.RandomUniform:
        return InitializerSpec("uniform", float(initializer.minval), float(initializer.maxval))
    if exact in (kinds.RandomNormal, kinds.TruncatedNormal):
        kind = "normal" if exact is kinds.RandomNormal else "truncated_normal"
        return InitializerSpec(kind, float(initializer.mean), float(initializer.stddev))
    if isinstance(initializer, kinds.VarianceScaling):
        return _scaled(layer, initializer, vocabulary_size, dim)
    raise Unsupported(
        f"embedding layer {layer!r}: initializer {exact.__name__} cannot be computed row by row; use zeros, ones, "
        "Constant, RandomUniform, RandomNormal, TruncatedNormal or a Glorot, He, LeCun or VarianceScaling one"
    )


def _scaled(layer: str, initializer: Any, vocabulary_size: int | None, dim: int) -> InitializerSpec:
    if vocabulary_size is None:
        raise Unsupported(
            f"embedding layer {layer!r}: {type(initializer).__name__} scales with the size of the vocabulary, and "
            "input_dim=None has none; give input_dim, or an initializer with a scale of its own"
        )
    fans = {"fan_in": vocabulary_size, "fan_out": dim, "fan_avg": (vocabulary_size + dim) / 2}
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return InitializerSpec("uniform", -limit, limit)
    if initializer.distribution == "truncated_normal":
        return InitializerSpec("truncated_normal", 0.0, math.sqrt(variance) / _TRUNCATION)
    return InitializerSpec("normal", 0.0, math.sqrt(variance))


def seed_of(initializer: Any, otherwise: int) -> int:
    """The seed that a person gave the initializer, or `otherwise`.

    Keras invents a random seed where none was given, which would differ in
    every process; the config keeps only what was given.
    """
    given = initializer.get_config().get("seed")
    return int(given) if isinstance(given, int) else otherwise
