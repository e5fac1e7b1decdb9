"""Initial values of rows: the distributions of Keras initializers."""

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.spec import InitializerSpec, variance_scaling
from elastable.embedding_store.errors import Unsupported


def initializer_spec(
    layer: str, initializer: keras.Initializer, vocabulary_size: int | None, dim: int
) -> InitializerSpec:
    """The distribution from which a Keras initializer draws `[vocabulary_size, dim]`.

    Raises:
        Unsupported: an initializer that cannot be computed per (id, column), or one scaled by the vocabulary for a
            table without one.
    """
    kinds = keras.initializers
    known = (kinds.Zeros, kinds.Ones, kinds.Constant, kinds.RandomUniform, kinds.RandomNormal, kinds.TruncatedNormal)
    # A subclass counts as its base, unless it overrides how it draws.
    bases = (base for base in (*known, kinds.VarianceScaling) if isinstance(initializer, base))
    kind = next((base for base in bases if type(initializer).__call__ is base.__call__), None)
    if kind is kinds.Zeros:
        return InitializerSpec("zeros")
    if kind is kinds.Ones:
        return InitializerSpec("ones")
    if kind is kinds.Constant:
        return _constant(layer, initializer.value, vocabulary_size, dim)
    if kind is kinds.RandomUniform:
        return InitializerSpec("uniform", float(initializer.minval), float(initializer.maxval))
    if kind in (kinds.RandomNormal, kinds.TruncatedNormal):
        name = "normal" if kind is kinds.RandomNormal else "truncated_normal"
        return InitializerSpec(name, float(initializer.mean), float(initializer.stddev))
    if kind is kinds.VarianceScaling:
        return _scaled(layer, initializer, vocabulary_size, dim)
    name = getattr(initializer, "__name__", type(initializer).__name__)
    raise Unsupported(
        f"embedding layer {layer!r}: initializer {name} cannot be computed row by row; use zeros, ones, "
        "Constant, RandomUniform, RandomNormal, TruncatedNormal or a Glorot, He, LeCun or VarianceScaling one; give a "
        "matrix of all rows as keras.initializers.Constant(matrix)"
    )


def _constant(layer: str, value: npt.ArrayLike, vocabulary_size: int | None, dim: int) -> InitializerSpec:
    if not np.ndim(value):
        return InitializerSpec("constant", float(np.asarray(value)))
    if vocabulary_size is None:
        raise Unsupported(
            f"embedding layer {layer!r}: Constant of shape {np.shape(value)} for a table of any id; use one number, or "
            "write rows by id with layer.write_rows(ids, rows)"
        )
    return InitializerSpec("zeros")  # all rows are given (`elastable.worker.rows.store_layer.first_rows`)


def _scaled(layer: str, initializer: keras.Initializer, vocabulary_size: int | None, dim: int) -> InitializerSpec:
    if vocabulary_size is None and initializer.mode != "fan_out":
        raise Unsupported(
            f"embedding layer {layer!r}: {type(initializer).__name__} scales with the size of the vocabulary, and "
            "input_dim=None has none; give input_dim, or an initializer with a scale of its own: "
            'VarianceScaling(mode="fan_out"), which scales with output_dim alone, or RandomUniform(-limit, limit)'
        )
    rows = float(vocabulary_size or 1)
    return InitializerSpec(*variance_scaling(initializer.scale, initializer.mode, initializer.distribution, rows, dim))


def seed_of(initializer: keras.Initializer, otherwise: int) -> int:
    """The user's seed of the initializer, or `otherwise`.

    Without a seed Keras draws one at random, which would differ in every process; the config contains only the user's
    seed.
    """
    return int(initializer.get_config()["seed"]) if was_seeded(initializer) else otherwise


def was_seeded(initializer: keras.Initializer) -> bool:
    """Whether the user gave the initializer an integer seed."""
    return isinstance(initializer.get_config().get("seed"), int)
