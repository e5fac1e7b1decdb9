"""Checks of the arguments of `et.Embedding`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.native.row_fold import COMBINERS

__all__ = [
    "initial_weights",
    "keras_optimizer_of",
    "membership_spec",
    "refuse_half_variables",
    "refuse_keras_only",
    "require_arguments",
]

Spec = TypeVar("Spec", AdmissionSpec, EvictionSpec)
_TABLE_DTYPES = ("float32", "bfloat16", "float16")


def refuse_keras_only(arguments: dict[str, object]) -> None:
    """Removes arguments that only Keras' layer supports; refuses them if they are set."""
    for name in ("lora_rank", "lora_alpha", "quantization_config"):
        value = arguments.pop(name, None)
        if value is not None:
            raise Unsupported(
                f"et.Embedding({name}={value!r}): a table in a store has neither LoRA nor quantization; for such a "
                "table use keras.layers.Embedding, or table_dtype= for rows of 16 bits"
            )


def refuse_half_variables(layer: keras.Layer) -> None:
    """Raises `Unsupported` for a layer whose rows would be a variable of 16 bits: Keras rounds it at every step."""
    if layer.variable_dtype in ("float16", "bfloat16"):
        raise Unsupported(
            f"embedding layer {layer.name!r}: dtype={layer.variable_dtype!r} keeps weights in 16 bits, and rows are "
            f"trained in float32; use dtype='mixed_{layer.variable_dtype}', which computes in 16 bits, or "
            f"table_dtype={layer.variable_dtype!r} with it for rows that are stored in 16 bits"
        )


def initial_weights(layer: str, weights: npt.ArrayLike, input_dim: int | None, output_dim: int) -> Float32:
    """The initial rows from Keras' argument `weights`: an array, or a list of one array."""
    only = weights[0] if isinstance(weights, list) and len(weights) == 1 else weights
    rows = np.ascontiguousarray(only, dtype=np.float32)
    if rows.shape != (input_dim, output_dim):
        raise BadSpec(
            f"embedding layer {layer!r}: weights have shape {rows.shape}, its table ({input_dim}, {output_dim}); "
            "weights need a fixed table of their own shape"
        )
    return rows


def require_arguments(
    layer: str,
    input_dim: int | None,
    output_dim: int | None,
    mask_zero: object,
    combiner: str | None,
    table_dtype: str | None,
) -> int:
    """`output_dim`; raises `BadSpec` if one of the arguments of `et.Embedding` is missing or invalid."""
    message = f"embedding layer {layer!r}"
    if output_dim is None:
        raise BadSpec(
            f"{message}: output_dim is missing; the order is Keras' own, et.Embedding(input_dim, output_dim), "
            f"input_dim=None for any int64 id: (None, {input_dim!r})"
        )
    if mask_zero not in (False, True):
        raise BadSpec(
            f"{message}: mask_zero must be True or False, got {mask_zero!r}; give combiner by its name, combiner="
        )
    _require_size(layer, "output_dim", output_dim)
    if input_dim is not None:
        _require_size(layer, "input_dim", input_dim)
    if combiner is not None and combiner not in COMBINERS:
        raise BadSpec(f"{message}: combiner {combiner!r}; known ones are None, {', '.join(COMBINERS)}")
    _require_table_dtype(layer, table_dtype)
    return output_dim


def _require_table_dtype(layer: str, table_dtype: object) -> None:
    if table_dtype is None or table_dtype in _TABLE_DTYPES:
        return
    message = f"embedding layer {layer!r}: table_dtype {table_dtype!r}; a layer's table is kept in "
    hint = ": int8 tables are served, not trained (embedding_store.convert_table)" if table_dtype == "int8" else ""
    raise BadSpec(message + ", ".join(_TABLE_DTYPES) + hint)


def _require_size(layer: str, argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadSpec(f"embedding layer {layer!r}: {argument} must be a positive integer, got {value!r}")


def keras_optimizer_of(layer: str, optimizer: object) -> keras.optimizers.Optimizer:
    """The Keras optimizer from an instance, a name or a config.

    Args:
        layer: Name of the embedding layer, for messages.
        optimizer: The layer's argument.

    Raises:
        BadSpec: Keras cannot create an optimizer from it.
    """
    try:
        return keras.optimizers.get(optimizer)
    except (ValueError, TypeError) as error:
        raise BadSpec(
            f"embedding layer {layer!r}: optimizer {optimizer!r} is no Keras optimizer ({error}); give an instance "
            'such as keras.optimizers.Adagrad(0.1), a name such as "adagrad", or the config of an optimizer'
        ) from error


def membership_spec(layer: str, kind: type[Spec], value: object, input_dim: int | None) -> Spec | None:
    """The `admission` or `eviction` of a layer as a spec.

    Args:
        layer: Its name, for errors.
        kind: `AdmissionSpec` or `EvictionSpec`.
        value: None, a spec of that kind, or a dict of its fields.
        input_dim: The layer's vocabulary; a fixed one allows neither.

    Raises:
        BadSpec: anything else, fields that cannot be, or a fixed vocabulary.
    """
    argument = "admission" if kind is AdmissionSpec else "eviction"
    message = f"embedding layer {layer!r}: {argument}"
    if value is None:
        return None
    if input_dim is not None:
        raise BadSpec(f"{message} is for tables of any ids: leave input_dim out (it is {input_dim})")
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise BadSpec(f"{message} must be None or an et.{kind.__name__}, got {value!r}")
    try:
        return kind(**value)
    except TypeError as error:
        raise BadSpec(f"{message}: {dict(value)} are no fields of et.{kind.__name__}: {error}") from error
