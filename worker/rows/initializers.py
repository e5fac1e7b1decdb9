"""Initial values of rows: the distributions of Keras initializers, and rows that are given or drawn as a whole."""

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import InitializerSpec, variance_scaling
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.tables.row_dtypes import rounded_rows
from elastable.worker.rows.store_layer import StoreLayer


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
    return InitializerSpec("zeros")  # all rows are given (`elastable.worker.rows.initializers.first_rows`)


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


# Initial rows that are not a function of each id: given by the user, or drawn by Keras


LARGEST_DRAW = 1 << 22
"""Elements (16 MiB) of the largest table that is drawn whole."""

_DRAWN = "_elastable_drawn"


def first_rows(layer: StoreLayer, unseeded: bool) -> Float32 | None:
    """All initial rows of a layer's table, if they are not `initial_rows` of its spec.

    They are the layer's `weights=`, the array of a `Constant`, or what Keras' own layer would draw with the
    initializer's seed. Without a seed Keras chooses one, by `keras.utils.set_random_seed` if that was called.

    Args:
        unseeded: Whether to draw also from an initializer without a seed.

    Returns:
        float32 `[input_dim, output_dim]`. None for rows that are not random, tables of any ids, and more than
            `LARGEST_DRAW` elements.

    Raises:
        BadSpec: a `Constant` whose array does not fit the table.
    """
    if layer.pretrained is not None:
        return np.asarray(layer.pretrained, np.float32)
    if np.ndim(getattr(layer.embeddings_initializer, "value", 0)):
        return _constant_rows(layer)
    if not unseeded and not was_seeded(layer.embeddings_initializer):
        return None
    drawn = vars(layer).get(_DRAWN)
    if drawn is None:
        rows = _draw(layer)
        drawn = () if rows is None else (rounded_rows(layer.table_dtype or "float32", rows),)
        object.__setattr__(layer, _DRAWN, drawn)  # past Keras' tracking
    return drawn[0] if drawn else None


def _draw(layer: StoreLayer) -> Float32 | None:
    initializer = layer.embeddings_initializer
    # A SeedGenerator counts the draws of everything that shares it: what Keras would draw is unknown here.
    if layer.input_dim is None or not isinstance(getattr(initializer, "seed", None), int):
        return None
    if layer.input_dim * layer.output_dim > LARGEST_DRAW:
        return None
    return np.asarray(initializer((layer.input_dim, layer.output_dim), dtype=layer.variable_dtype), np.float32)


def _constant_rows(layer: StoreLayer) -> Float32:
    """Of an array that is no matrix, as one row for all, only up to `LARGEST_DRAW` elements are made."""
    array = np.asarray(layer.embeddings_initializer.value, np.float32)
    shape = (layer.input_dim or 0, layer.output_dim)
    fits = array.shape == shape or (shape[0] * shape[1] <= LARGEST_DRAW and _broadcasts(array.shape, shape))
    if not fits:
        raise BadSpec(
            f"embedding layer {layer.name!r}: Constant of shape {array.shape} for a table of shape {shape}: give all "
            "rows, or one number"
        )
    return rounded_rows(layer.table_dtype or "float32", np.ascontiguousarray(np.broadcast_to(array, shape)))


def _broadcasts(given: tuple[int, ...], shape: tuple[int, int]) -> bool:
    try:
        return np.broadcast_shapes(given, shape) == shape
    except ValueError:
        return False
