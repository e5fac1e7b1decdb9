"""Arguments of `et.Embedding`, checked when the layer is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec
from elastable.embedding_store.errors import BadSpec, Unsupported

__all__ = [
    "initial_weights",
    "keras_optimizer_of",
    "membership_spec",
    "order_of_keras",
    "refuse_keras_only",
    "require_size",
    "require_table_dtype",
]

Spec = TypeVar("Spec", AdmissionSpec, EvictionSpec)
_TABLE_DTYPES = ("float32", "bfloat16", "float16")


def refuse_keras_only(arguments: dict[str, object]) -> None:
    """Takes what plain Keras' layer has and a table in a store does not out of `arguments`; refuses it where given."""
    for name in ("lora_rank", "lora_alpha", "quantization_config"):
        value = arguments.pop(name, None)
        if value is not None:
            raise Unsupported(
                f"et.Embedding({name}={value!r}): a table in a store has neither LoRA nor quantization; for such a "
                "table use keras.layers.Embedding, or table_dtype= for rows of 16 bits"
            )


def order_of_keras(right: str) -> str:
    """What a message says of the order of arguments; `right` is the caller's own, put right."""
    return f"the order is Keras' own, et.Embedding(input_dim, output_dim), input_dim=None for any int64 id: {right}"


def initial_weights(layer: str, weights: npt.ArrayLike, input_dim: int | None, output_dim: int) -> Float32:
    """The rows that Keras' argument `weights` means: an array, or a list of one."""
    only = weights[0] if isinstance(weights, list) and len(weights) == 1 else weights
    rows = np.ascontiguousarray(only, dtype=np.float32)
    if rows.shape != (input_dim, output_dim):
        raise BadSpec(
            f"embedding layer {layer!r}: weights have shape {rows.shape}, its table ({input_dim}, {output_dim}); "
            "weights need a fixed table of their own shape"
        )
    return rows


def require_table_dtype(layer: str, table_dtype: object) -> None:
    """Refuses what rows cannot be kept in."""
    if table_dtype is None or table_dtype in _TABLE_DTYPES:
        return
    told = f"embedding layer {layer!r}: table_dtype {table_dtype!r}; a layer's table is kept in "
    hint = ": int8 tables are served, not trained (embedding_store.convert_table)" if table_dtype == "int8" else ""
    raise BadSpec(told + ", ".join(_TABLE_DTYPES) + hint)


def require_size(layer: str, argument: str, value: object) -> None:
    """Refuses what is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadSpec(f"embedding layer {layer!r}: {argument} must be a positive integer, got {value!r}")


def keras_optimizer_of(layer: str, optimizer: object) -> keras.optimizers.Optimizer:
    """The Keras optimizer that an instance, a name or a config stands for.

    Args:
        layer: Name of the embedding layer, for messages.
        optimizer: What the layer was given.

    Raises:
        BadSpec: Keras makes no optimizer of it.
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
    told = f"embedding layer {layer!r}: {argument}"
    if value is None:
        return None
    if input_dim is not None:
        raise BadSpec(f"{told} is for tables of any ids: leave input_dim out (it is {input_dim})")
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise BadSpec(f"{told} must be None or an et.{kind.__name__}, got {value!r}")
    try:
        return kind(**value)
    except TypeError as error:
        raise BadSpec(f"{told}: {dict(value)} are no fields of et.{kind.__name__}: {error}") from error
