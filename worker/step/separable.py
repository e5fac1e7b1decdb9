"""By what a model's loss is divided, read from what it is made of, where there is no graph to read it from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.master.api import DivisorKind
from elastable.master.backend.contract import backend
from elastable.worker.keras.seeds import layers_of
from elastable.worker.losses.loss_parts import all_metrics
from elastable.worker.step.traced.step_plan import overrides

_OURS = ("keras.", "elastable.")
#: Of Keras, but they run code of the user's, or mix records by design.
_NOT_READ = (
    *("Lambda", "TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper", "MixUp", "CutMix", "RandAugment"),
    *("Circle", "Dice", "Tversky", "CTC"),
)
_ELEMENTWISE = (
    *(
        "Absolute",
        "Add",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "Cast",
        "Clip",
        "ConvertToTensor",
        "Equal",
        "Exp",
        "FloorDivide",
        "Floor",
    ),
    *("Greater", "GreaterEqual", "LeftShift", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot"),
    *("LogicalOr", "Maximum", "Minimum", "Mod", "Multiply", "Negative", "NotEqual", "Power", "Relu", "RightShift"),
    *("Sigmoid", "Softplus", "Sqrt", "Square", "Subtract", "Tanh", "TrueDivide", "Where"),
)
_ALONG_AN_AXIS = ("Concatenate", "ExpandDims", "Max", "Mean", "Min", "Softmax", "Squeeze", "Stack", "Sum")


def divisor_kind(model: keras.Model, average: str) -> DivisorKind:
    """What every term of the loss is divided by, where several micro-batches are combined.

    Args:
        average: As of `JobSpec`.

    Raises:
        Unsupported: it is not known; says why.
    """
    if average == "records":
        return DivisorKind.RECORDS
    reasons = _of_other_terms(model) if average == "sum" else _of_everything(model)
    if (why := next(reasons, None)) is not None:
        refuse_average(model, why)
    return DivisorKind.NOTHING if average == "sum" else DivisorKind.RECORDS


def refuse_average(model: keras.Model, why: str) -> None:
    """Raises `Unsupported`, with the reason."""
    raise Unsupported(
        f"model {model.name!r}: with grads_to_wait above 1 every term of the loss needs a known divisor. On Keras' "
        f"{backend().name} backend only losses, metrics and layers of Keras that keep records apart have one, and "
        f"{why}: use grads_to_wait=1 (--grads-to-wait 1), or average='records' (--average records), which trains it as "
        "it is"
    )


def _of_everything(model: keras.Model) -> Iterator[str]:
    yield from _of_other_terms(model)
    for part in layers_of(model):
        if isinstance(part, keras.Model):
            if type(part).__module__.partition(".")[0] != "keras":
                yield f"{type(part).__name__} is a class of its own"
            for operation in getattr(part, "operations", ()):
                if not isinstance(operation, keras.Layer) and not _is_rowwise(operation):
                    yield f"operation {type(operation).__name__} may mix records"
        else:
            yield from _of_layer(part)
    yield from _of_losses(model)
    for metric in all_metrics(model):
        function = getattr(metric, "_fn", None)
        if not _is_of_keras(metric) or (function is not None and not _is_of_keras(function)):
            yield f"metric {metric.name!r} is none of Keras' own"


def _of_other_terms(model: keras.Model) -> Iterator[str]:
    if overrides(model, "train_step"):
        yield "the model has a train_step of its own"
    if type(model).compute_loss is not keras.Model.compute_loss:
        yield "the model computes its loss itself"
    for weight in variables_of(model.trainable_weights):
        if weight.regularizer is not None:
            yield f"{weight.path} has a regularizer"
    for layer in layers_of(model):
        if getattr(layer, "embeddings_regularizer", None) is not None or layer.activity_regularizer is not None:
            yield f"layer {layer.name!r} has a regularizer"


def _of_layer(layer: keras.Layer) -> Iterator[str]:
    axis = getattr(layer, "axis", None)
    functions = [getattr(layer, name, None) for name in ("activation", "recurrent_activation")]
    own = not all(_is_of_keras(each) for each in (layer, *filter(callable, functions)))
    if own or 0 in (axis if isinstance(axis, list | tuple) else (axis,)) or getattr(layer, "stateful", False):
        yield f"layer {layer.name!r} ({type(layer).__name__}) may mix records"


def _of_losses(model: keras.Model) -> Iterator[str]:
    for given in keras.tree.flatten(model.loss):
        loss = keras.losses.get(given) if isinstance(given, str) else given
        if loss is None:
            continue
        function = getattr(loss, "fn", loss)
        ignores = getattr(loss, "ignore_class", None) is not None or getattr(loss, "_fn_kwargs", {}).get("ignore_class")
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if not _is_of_keras(loss) or not _is_of_keras(function) or ignores is True or ignores not in (False, None):
            yield f"its loss {getattr(loss, 'name', getattr(loss, '__name__', loss))!r} is none of these"
        if reduction != "sum_over_batch_size":
            yield f"its loss has reduction={reduction!r}"


def _is_rowwise(operation: Any) -> bool:
    """Whether an operation of a Functional model is known to keep records, on the first axis, apart."""
    name, axis = type(operation).__name__, getattr(operation, "axis", None)
    if not type(operation).__module__.startswith("keras."):
        return False
    if name in _ALONG_AN_AXIS:
        axes = axis if isinstance(axis, list | tuple) else (axis,)
        return all(isinstance(each, int) and each != 0 for each in axes) and not _is_first(operation, axes)
    if name == "GetItem":
        keys = [node.arguments.args[1] for node in operation._inbound_nodes]
        return all(isinstance(key, tuple) and key[0] == slice(None) for key in keys)
    # [n, 1] - [n] is of every record with every other.
    ranks = {
        len(each.shape) for node in operation._inbound_nodes for each in (*node.input_tensors, *node.output_tensors)
    }
    return name in _ELEMENTWISE and len(ranks) == 1


def _is_first(operation: Any, axes: Any) -> bool:
    """Whether an axis that is counted from the end is that of the records."""
    return any(axis + len(each.shape) == 0 for axis in axes for each in _tensors_of(operation))


def _tensors_of(operation: Any) -> list[keras.KerasTensor]:
    return [each for node in operation._inbound_nodes for each in (*node.input_tensors, *node.output_tensors)]


def _is_of_keras(value: Any) -> bool:
    named = value if hasattr(value, "__name__") else type(value)
    return str(named.__module__).startswith(_OURS) and named.__name__ not in _NOT_READ
