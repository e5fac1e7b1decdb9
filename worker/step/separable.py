"""By what a model's loss is divided, read from what it is made of, where there is no graph to read it from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.master.api import DivisorKind
from elastable.master.backend.contract import backend
from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.structures import BatchSpec
from elastable.worker.losses.loss_parts import all_metrics
from elastable.worker.step.step_plan import overrides

_OURS = ("keras.", "elastable.")
#: Layers of Keras that run code of the user's, or mix records by design.
_NOT_READ = ("Lambda", "TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper", "MixUp", "CutMix", "RandAugment")
_ELEMENTWISE = (
    "Absolute", "Add", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Cast", "Clip", "ConvertToTensor", "Equal", "Exp",
    "Floor", "FloorDivide", "Greater", "GreaterEqual", "LeftShift", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd",
    "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mod", "Multiply", "Negative", "NotEqual", "Power", "Relu",
    "RightShift", "Sigmoid", "Softplus", "Sqrt", "Square", "Subtract", "Tanh", "TrueDivide", "Where",
)  # fmt: skip
_ALONG_AN_AXIS = ("Concatenate", "ExpandDims", "Max", "Mean", "Min", "Softmax", "Squeeze", "Stack", "Sum")
_AXES = ("axis", "axes", "_attention_axes")
#: Functions of Keras' losses and metrics that have a value for each record.
_OF_EACH_RECORD = (
    "mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_logarithmic_error",
    "huber", "log_cosh", "hinge", "squared_hinge", "categorical_hinge", "binary_crossentropy",
    "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy",
    "sparse_categorical_crossentropy", "kl_divergence", "poisson", "cosine_similarity", "accuracy", "binary_accuracy",
    "categorical_accuracy", "sparse_categorical_accuracy", "top_k_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
)  # fmt: skip
#: Metrics of Keras whose states are sums over records, or which hold others.
_SUMS = (
    "AUC", "BinaryIoU", "CompileMetrics", "F1Score", "FBetaScore", "FalseNegatives", "FalsePositives", "IoU", "Mean",
    "MeanIoU", "OneHotIoU", "OneHotMeanIoU", "Precision", "PrecisionAtRecall", "R2Score", "Recall",
    "RecallAtPrecision", "RootMeanSquaredError", "SensitivityAtSpecificity", "SpecificityAtSensitivity",
    "TrueNegatives", "TruePositives",
)  # fmt: skip


def divisor_kind(model: keras.Model, average: str, spec: BatchSpec) -> DivisorKind:
    """What every term of the loss is divided by, where several micro-batches are combined.

    Args:
        average: As of `JobSpec`.
        spec: `batch_spec` of a batch.

    Raises:
        Unsupported: it is not known; says why.
    """
    if average == "records":
        return DivisorKind.RECORDS
    reasons = _of_other_terms(model) if average == "sum" else _of_everything(model, spec)
    if (why := next(reasons, None)) is not None:
        refuse_average(model, why)
    return DivisorKind.NOTHING if average == "sum" or _is_a_sum(model) else DivisorKind.RECORDS


def _is_a_sum(model: keras.Model) -> bool:
    """Whether the loss is the one of the one output, summed over the records."""
    return len(model.outputs) == 1 and getattr(model.loss, "reduction", None) == "sum"


def refuse_average(model: keras.Model, why: str) -> None:
    """Raises `Unsupported`, with the reason."""
    raise Unsupported(
        f"model {model.name!r}: with grads_to_wait above 1 every term of the loss needs a known divisor. On Keras' "
        f"{backend().name} backend layers of Keras have one, and losses and metrics of Keras, or of one output in "
        f"keras.ops, where they keep records apart, and {why}: use grads_to_wait=1 (--grads-to-wait 1), or "
        "average='records' (--average records), which trains it as it is"
    )


def _of_everything(model: keras.Model, spec: BatchSpec) -> Iterator[str]:
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
    if any(len(output.shape) < 2 for output in model.outputs):
        yield "an output has no axis but that of the records (end it in Reshape((1,)))"
    lists = any(each.lists for each in keras.tree.flatten(spec))
    if lists and any(None in output.shape[1:] for output in model.outputs):
        yield "an output is as long as the longest list of its micro-batch"
    yield from _of_losses(model, spec)
    for metric in all_metrics(model):
        function = getattr(metric, "_fn", None)
        sums = _is_of_keras(metric) and type(metric).__name__ in _SUMS
        known = sums if function is None else _has_a_value_a_record(metric, function)
        if not known and function is not None and _is_of_keras(metric):
            known = _axes_in_ops(partial(function, **metric._fn_kwargs), model, spec) == "records"
        if not known:
            yield f"metric {metric.name!r} is none of these"


def _of_losses(model: keras.Model, spec: BatchSpec) -> Iterator[str]:
    weighted = len(spec) > 2
    for given in keras.tree.flatten(model.loss):
        loss = keras.losses.get(given) if isinstance(given, str) else given
        if loss is None:
            continue
        if not _has_a_value_a_record(loss, getattr(loss, "fn", loss)):
            plain = type(loss).__call__ is keras.losses.Loss.__call__
            found = _axes_in_ops(loss.call if plain else loss, model, spec)
            # A mean of its own is left as it is by every reduction.
            if not (found == "records" or (found == "mean" and not weighted and not _is_a_sum(model))):
                yield f"its loss {getattr(loss, 'name', getattr(loss, '__name__', loss))!r} is none of these"
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        means = ("sum_over_batch_size", "mean", *(() if weighted else ("mean_with_sample_weight",)))
        if reduction not in means and not _is_a_sum(model):
            yield f"its loss has reduction={reduction!r}"


def _axes_in_ops(function: Callable[..., Any], model: keras.Model, spec: BatchSpec) -> str:
    """What a function of the user's, of targets and predictions, comes to, as far as operations of Keras show it.

    "records": a value, or as many as for any other, for each record; "mean": the mean of such; "": unknown.
    """
    targets = keras.tree.flatten(spec[1]) if len(spec) > 1 else []
    given = [*targets, *model.outputs]
    if len(given) != 2 or len(given[0].shape) != len(given[1].shape):
        return ""
    try:
        found = function(*(keras.Input(tuple(each.shape[1:])) for each in given))
    except Exception:  # noqa: BLE001 - what it does with other tensors is not known
        return ""
    if not isinstance(found, keras.KerasTensor) or getattr(found, "_keras_mask", None) is not None:
        return ""
    operation, waiting, result = found._keras_history.operation, [found], "records"
    if _is_of_keras(operation) and type(operation).__name__ == "Mean" and operation.axis is None:
        waiting, result = list(operation._inbound_nodes[0].input_tensors), "mean"
    if any(len(each.shape) == 0 or each.shape[0] is not None or None in each.shape[1:] for each in waiting):
        return ""
    while waiting:
        operation = waiting.pop()._keras_history.operation
        if not isinstance(operation, keras.layers.InputLayer):
            if not _is_rowwise(operation):
                return ""
            waiting += operation._inbound_nodes[0].input_tensors
    return result


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
    functions = [getattr(layer, name, None) for name in ("activation", "recurrent_activation")]
    own = not all(_is_of_keras(each) for each in (layer, *filter(callable, functions)))
    if own or type(layer).__name__ in _NOT_READ or _along_records(layer) or getattr(layer, "stateful", False):
        yield f"layer {layer.name!r} ({type(layer).__name__}) may mix records"


def _has_a_value_a_record(of: Any, function: Any) -> bool:
    """Whether a loss or metric of Keras has a value for each record, along the last axis, and counts all of them."""
    settings = {**vars(of), **getattr(of, "_fn_kwargs", {})} if hasattr(of, "__dict__") else {}
    plain = settings.get("axis", -1) == -1 and settings.get("ignore_class") is None
    return _is_of_keras(of) and _is_of_keras(function) and function.__name__ in _OF_EACH_RECORD and plain


def _is_rowwise(operation: Any) -> bool:
    """Whether an operation of a Functional model is known to keep records, on the first axis, apart."""
    name = type(operation).__name__
    if not _is_of_keras(operation):
        return False
    if name in _ALONG_AN_AXIS:
        return operation.axis is not None and not _along_records(operation)
    if name == "GetItem":
        keys = [node.arguments.args[1] for node in operation._inbound_nodes]
        return all(isinstance(key, tuple) and key[0] == slice(None) for key in keys)
    # [n, 1] - [n] is of every record with every other.
    return name in _ELEMENTWISE and len({len(each.shape) for each in _tensors_of(operation)}) == 1


def _along_records(operation: Any) -> bool:
    """Whether an axis of an operation or layer is that of the records, counted from either end."""
    axes = [getattr(operation, name, None) for name in _AXES]
    flat = [each for each in keras.tree.flatten(axes) if isinstance(each, int)]
    return any(axis == 0 or axis + len(each.shape) == 0 for axis in flat for each in _tensors_of(operation))


def _tensors_of(operation: Any) -> list[keras.KerasTensor]:
    return [each for node in operation._inbound_nodes for each in (*node.input_tensors, *node.output_tensors)]


def _is_of_keras(value: Any) -> bool:
    return str(getattr(value, "__module__", type(value).__module__)).startswith(_OURS)
