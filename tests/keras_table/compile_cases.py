"""What `Model.compile` takes besides optimizers: losses, metrics, weights, and how a step is run."""

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import keras
import numpy as np
from keras import losses, metrics

from tests.keras_table.case import Case, Outcome, Side, arguments_in, around, code_in, small, trained

_BINARY_LOSSES = "BinaryCrossentropy BinaryFocalCrossentropy Hinge SquaredHinge Poisson Dice Tversky"
_REGRESSION_LOSSES = (
    "MeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredLogarithmicError LogCosh Huber "
    "CosineSimilarity"
)
_CLASS_LOSSES = "CategoricalCrossentropy CategoricalFocalCrossentropy CategoricalHinge KLDivergence"
_REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]
_BINARY_METRICS = (
    "AUC BinaryAccuracy BinaryCrossentropy FalseNegatives FalsePositives Hinge Precision Recall SquaredHinge "
    "TrueNegatives TruePositives Poisson"
)
_THRESHOLD_METRICS = "PrecisionAtRecall RecallAtPrecision SensitivityAtSpecificity SpecificityAtSensitivity"
_REGRESSION_METRICS = (
    "MeanSquaredError RootMeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredLogarithmicError "
    "LogCoshError CosineSimilarity R2Score PearsonCorrelation ConcordanceCorrelation"
)
_CLASS_METRICS = "CategoricalAccuracy CategoricalCrossentropy CategoricalHinge KLDivergence TopKCategoricalAccuracy"


def two_outputs(side: Side, **dense: object) -> keras.Model:
    model = around(keras.layers.Embedding(side.vocabulary, 4, name="items"), keras.layers.Flatten())
    outputs = {name: keras.layers.Dense(1, name=name, **dense)(model.output) for name in ("one", "two")}
    return keras.Model(model.input, outputs)


def _two(side: Side, **options: object) -> object:
    losses_of = {"loss": {"one": "mse", "two": "mse"}} if "loss_weights" in options else {}
    return trained(side, two_outputs(side), y={"one": side.y, "two": side.y * 2}, **losses_of, **options)


def one_hot(side: Side) -> np.ndarray:
    """float32 [24, 3]: one of three classes."""
    return np.eye(3, dtype=np.float32)[side.x[:, 0] % 3]


def _binary(side: Side, **options: object) -> object:
    return trained(side, small(side, activation="sigmoid"), y=side.labels, **options)


def _classes(side: Side, y: object = None, **options: object) -> Outcome:
    return trained(side, small(side, 3, "softmax"), y=one_hot(side) if y is None else y, **options)


def _said(name: str, run: Callable[..., object] = trained, meaning: str = "") -> Case:
    """A row that compiles with what its name says."""
    code = code_in(name)
    kind = losses if code.startswith("loss=") else metrics
    covers = [f"compile.{each.arg}" for each in _keywords(code)]
    covers += [f"{kind.__name__.rpartition('.')[2]}.{found}" for found in re.findall(r"\b([A-Z]\w*)\(", code)]

    def program(side: Side) -> object:
        return run(side, **arguments_in(code, vars(kind), {"function": _squared}))

    return Case(name, program, " ".join(covers), meaning)


def _keywords(code: str) -> list[ast.keyword]:
    call = ast.parse(f"dict({code})", mode="eval").body
    assert isinstance(call, ast.Call)
    return call.keywords


def _losses(names: str, run: Callable[..., object]) -> list[Case]:
    # Of one number the cosine is its sign, and its gradient is rounding.
    on_jax = {"CosineSimilarity": 1e-4}
    return [replace(_said(f"`loss={name}()`", run), on_jax=on_jax.get(name, 1e-5)) for name in names.split()]


def _metrics(names: str, run: Callable[..., object], argument: str = "") -> Case:
    return _said(f"`metrics=[{', '.join(f'{name}({argument})' for name in names.split())}]`", run)


def _reduction(reduction: str) -> Case:
    def program(side: Side) -> object:
        loss, rate = losses.MeanSquaredError(reduction=reduction), 0.05
        weights: list[dict[str, object]] = [{}, {"sample_weight": side.weights}]
        return [trained(side, loss=loss, fit=fit, optimizer=keras.optimizers.SGD(rate)) for fit in weights]

    name = f"`loss=MeanSquaredError(reduction={reduction!r})`, also with `sample_weight`"
    return Case(name, program, f"reduction.{reduction}")


def _squared(y: object, predicted: keras.KerasTensor) -> keras.KerasTensor:
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)


def _sparse(side: Side, **options: object) -> object:
    return _classes(side, y=side.x[:, 0] % 3, **options)


def _circle(side: Side) -> object:
    return trained(side, small(side, 3), y=side.x[:, 0] % 3, loss=losses.Circle())


def _ctc(side: Side) -> object:
    model = around(keras.layers.Embedding(side.vocabulary, 4, name="items"), keras.layers.Dense(4))
    return trained(side, model, y=side.x[:, :2] % 3 + 1, loss=losses.CTC())


def _iou(side: Side) -> list[object]:
    of_classes = [metrics.OneHotIoU(3, [0, 1]), metrics.OneHotMeanIoU(3)]
    binary = [metrics.BinaryIoU([0, 1]), metrics.MeanIoU(2), metrics.IoU(2, [0])]
    return [
        _classes(side, loss="categorical_crossentropy", metrics=of_classes),
        _binary(side, loss="binary_crossentropy", metrics=binary),
    ]


def _f_score_of_each_class(side: Side) -> object:
    history = _classes(side, loss="categorical_crossentropy", metrics=[metrics.F1Score()])["history"]
    if side.stored:
        return [history[f"f1_score_{place}"][0] for place in range(3)]
    return [float(score) for score in np.asarray(history["f1_score"][0])]


class _Largest(metrics.Metric):
    """The largest prediction of the epoch: a state that is neither a sum nor a mean."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y: keras.KerasTensor, predicted: keras.KerasTensor, sample_weight: object = None) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(predicted)))

    def result(self) -> object:
        return keras.ops.convert_to_tensor(self.largest)


def _class_scores(side: Side, **options: object) -> object:
    return _classes(side, loss="categorical_crossentropy", **options)


_SPARSE_METRICS = "SparseCategoricalAccuracy SparseCategoricalCrossentropy SparseTopKCategoricalAccuracy"
CASES = [
    _said("`loss='mse'`, `metrics=['mae']`"),
    Case("`loss=` a function", lambda side: trained(side, loss=_squared), "compile.loss losses.Loss"),
    *_losses(_REGRESSION_LOSSES, trained),
    *_losses(_BINARY_LOSSES, _binary),
    *_losses(_CLASS_LOSSES, _classes),
    _said("`loss=SparseCategoricalCrossentropy(ignore_class=1)`", _sparse),
    _said("`loss=CategoricalGeneralizedCrossEntropy()`", _sparse),
    Case("`loss=Circle()`", _circle, "losses.Circle"),
    Case("`loss=CTC()`", _ctc, "losses.CTC"),
    *map(_reduction, _REDUCTIONS),
    _said("`loss={'one': 'mse', 'two': 'mae'}`", _two),
    _said("`loss_weights={'one': 0.3, 'two': 2.0}`", _two),
    _said("`metrics={'one': ['mae'], 'two': ['mse']}`", _two),
    Case(
        "`weighted_metrics=['mae']` with `sample_weight`",
        lambda side: trained(side, weighted_metrics=["mae"], metrics=["mse"], fit={"sample_weight": side.weights}),
        "compile.weighted_metrics",
    ),
    _metrics(_BINARY_METRICS, _binary),
    _metrics(_THRESHOLD_METRICS, _binary, "0.5"),
    _metrics(_REGRESSION_METRICS, trained),
    # PyTorch has no five largest of three.
    replace(_metrics(_CLASS_METRICS, _classes), only="tensorflow jax"),
    replace(_metrics(_SPARSE_METRICS, partial(_sparse, loss="sparse_categorical_crossentropy")), only="tensorflow jax"),
    Case(
        "`metrics=[OneHotIoU(3, [0, 1]), OneHotMeanIoU(3)]`, `[BinaryIoU(), MeanIoU(2), IoU(2, [0])]`",
        _iou,
        "metrics.OneHotIoU metrics.OneHotMeanIoU metrics.BinaryIoU metrics.MeanIoU metrics.IoU",
    ),
    Case(
        "`metrics=['accuracy', MeanMetricWrapper(function)]`",
        lambda side: _binary(side, metrics=["accuracy", metrics.MeanMetricWrapper(_squared, name="squared")]),
        "metrics.Accuracy metrics.MeanMetricWrapper",
    ),
    _said("`metrics=[F1Score('macro'), FBetaScore('micro')]`", _class_scores),
    Case(
        "`metrics=[F1Score()]`, with a value for each class",
        _f_score_of_each_class,
        "metrics.F1Score",
        "each value has a name of its own: `f1_score_0`, `f1_score_1`, ...",
    ),
    Case(
        "`metrics=` a class of one's own, whose state is a maximum",
        lambda side: trained(side, metrics=[_Largest()]),
        "metrics.Metric",
    ),
    _said("`run_eagerly=True`"),
    _said("`run_eagerly=False`"),
    _said("`jit_compile=True`", partial(trained, run_eagerly=False)),
    replace(_said("`steps_per_execution=3`", partial(trained, run_eagerly=False)), only="tensorflow jax"),
    _said("`auto_scale_loss=False`"),
    _said("`optimizer='rmsprop'`, by its name"),
]
