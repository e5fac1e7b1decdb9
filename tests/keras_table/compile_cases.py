"""What `Model.compile` takes besides optimizers: losses, metrics, weights, and how a step is run."""

from collections.abc import Callable

import keras
import numpy as np

from tests.keras_table.case import Case
from tests.keras_table.sides import Outcome, Side, around, small, trained

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
    return trained(side, two_outputs(side), y={"one": side.y, "two": side.y * 2}, **options)


def one_hot(side: Side) -> np.ndarray:
    """float32 [24, 3]: one of three classes."""
    return np.eye(3, dtype=np.float32)[side.x[:, 0] % 3]


def _binary(side: Side, **options: object) -> object:
    return trained(side, small(side, activation="sigmoid"), y=side.labels, **options)


def _classes(side: Side, y: object = None, **options: object) -> Outcome:
    return trained(side, small(side, 3, "softmax"), y=one_hot(side) if y is None else y, **options)


def _losses(names: str, run: Callable[..., object]) -> list[Case]:
    def case(name: str) -> Case:
        covers = f"losses.{name} compile.loss"
        return Case(f"`loss={name}()`", lambda side: run(side, loss=getattr(keras.losses, name)()), covers)

    return [case(name) for name in names.split()]


def _metrics(all_of_them: str, run: Callable[..., object], *arguments: object) -> Case:
    names = all_of_them.split()

    def program(side: Side) -> object:
        return run(side, metrics=[getattr(keras.metrics, name)(*arguments) for name in names])

    said = ", ".join(f"{name}({', '.join(map(str, arguments))})" for name in names)
    return Case(f"`metrics=[{said}]`", program, " ".join([f"metrics.{name}" for name in names] + ["compile.metrics"]))


def _reduction(reduction: str) -> Case:
    def program(side: Side) -> object:
        loss, rate = keras.losses.MeanSquaredError(reduction=reduction), 0.05
        weights: list[dict[str, object]] = [{}, {"sample_weight": side.weights}]
        return [trained(side, loss=loss, fit=fit, optimizer=keras.optimizers.SGD(rate)) for fit in weights]

    name = f"`loss=MeanSquaredError(reduction={reduction!r})`, also with `sample_weight`"
    return Case(name, program, f"reduction.{reduction}")


def _squared(y: object, predicted: keras.KerasTensor) -> keras.KerasTensor:
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)


def _sparse(side: Side, **options: object) -> object:
    return _classes(side, y=side.x[:, 0] % 3, **options)


def _circle(side: Side) -> object:
    return trained(side, small(side, 3), y=side.x[:, 0] % 3, loss=keras.losses.Circle())


def _ctc(side: Side) -> object:
    model = around(keras.layers.Embedding(side.vocabulary, 4, name="items"), keras.layers.Dense(4))
    return trained(side, model, y=side.x[:, :2] % 3 + 1, loss=keras.losses.CTC())


def _iou(side: Side) -> list[object]:
    metrics = keras.metrics
    of_classes = [metrics.OneHotIoU(3, [0, 1]), metrics.OneHotMeanIoU(3)]
    binary = [metrics.BinaryIoU([0, 1]), metrics.MeanIoU(2), metrics.IoU(2, [0])]
    return [
        _classes(side, loss="categorical_crossentropy", metrics=of_classes),
        _binary(side, loss="binary_crossentropy", metrics=binary),
    ]


def _f_scores(side: Side) -> object:
    scores = [keras.metrics.F1Score("macro"), keras.metrics.FBetaScore("micro")]
    return _classes(side, loss="categorical_crossentropy", metrics=scores)


def _f_score_of_each_class(side: Side) -> object:
    history = _classes(side, loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()])["history"]
    if side.stored:
        return [history[f"f1_score_{place}"][0] for place in range(3)]
    return [float(score) for score in np.asarray(history["f1_score"][0])]


class _Largest(keras.metrics.Metric):
    """The largest prediction of the epoch: a state that is neither a sum nor a mean."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.largest = self.add_weight(name="largest", initializer="zeros")

    def update_state(self, y: keras.KerasTensor, predicted: keras.KerasTensor, sample_weight: object = None) -> None:
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(predicted)))

    def result(self) -> object:
        return self.largest


CASES = [
    Case(
        "`loss='mse'`, `metrics=['mae']`", lambda side: trained(side, metrics=["mae"]), "compile.loss compile.metrics"
    ),
    Case("`loss=` a function", lambda side: trained(side, loss=_squared), "compile.loss losses.Loss"),
    *_losses(_REGRESSION_LOSSES, trained),
    *_losses(_BINARY_LOSSES, _binary),
    *_losses(_CLASS_LOSSES, _classes),
    Case(
        "`loss=SparseCategoricalCrossentropy(ignore_class=1)`",
        lambda side: _sparse(side, loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=1)),
        "losses.SparseCategoricalCrossentropy",
    ),
    Case(
        "`loss=CategoricalGeneralizedCrossEntropy()`",
        lambda side: _classes(side, y=side.x[:, 0] % 3, loss=keras.losses.CategoricalGeneralizedCrossEntropy()),
        "losses.CategoricalGeneralizedCrossEntropy",
    ),
    Case("`loss=Circle()`", _circle, "losses.Circle"),
    Case("`loss=CTC()`", _ctc, "losses.CTC"),
    *map(_reduction, _REDUCTIONS),
    Case(
        "`loss={'one': 'mse', 'two': 'mae'}`",
        lambda side: _two(side, loss={"one": "mse", "two": "mae"}),
        "compile.loss",
    ),
    Case(
        "`loss_weights={'one': 0.3, 'two': 2.0}`",
        lambda side: _two(side, loss={"one": "mse", "two": "mse"}, loss_weights={"one": 0.3, "two": 2.0}),
        "compile.loss_weights",
    ),
    Case(
        "`metrics={'one': ['mae'], 'two': ['mse']}`",
        lambda side: _two(side, metrics={"one": ["mae"], "two": ["mse"]}),
        "compile.metrics",
    ),
    Case(
        "`weighted_metrics=['mae']` with `sample_weight`",
        lambda side: trained(side, weighted_metrics=["mae"], metrics=["mse"], fit={"sample_weight": side.weights}),
        "compile.weighted_metrics",
    ),
    _metrics(_BINARY_METRICS, _binary),
    _metrics(_THRESHOLD_METRICS, _binary, 0.5),
    _metrics(_REGRESSION_METRICS, trained),
    _metrics(_CLASS_METRICS, _classes),
    Case(
        "`metrics=[SparseCategoricalAccuracy(), SparseCategoricalCrossentropy(), SparseTopKCategoricalAccuracy()]`",
        lambda side: _sparse(
            side,
            loss="sparse_categorical_crossentropy",
            metrics=[
                keras.metrics.SparseCategoricalAccuracy(),
                keras.metrics.SparseCategoricalCrossentropy(),
                keras.metrics.SparseTopKCategoricalAccuracy(2),
            ],
        ),
        "metrics.SparseCategoricalAccuracy metrics.SparseCategoricalCrossentropy metrics.SparseTopKCategoricalAccuracy",
    ),
    Case(
        "`metrics=[OneHotIoU(3, [0, 1]), OneHotMeanIoU(3)]`, `[BinaryIoU(), MeanIoU(2), IoU(2, [0])]`",
        _iou,
        "metrics.OneHotIoU metrics.OneHotMeanIoU metrics.BinaryIoU metrics.MeanIoU metrics.IoU",
    ),
    Case(
        "`metrics=['accuracy', MeanMetricWrapper(function)]`",
        lambda side: _binary(side, metrics=["accuracy", keras.metrics.MeanMetricWrapper(_squared, name="squared")]),
        "metrics.Accuracy metrics.MeanMetricWrapper",
    ),
    Case("`metrics=[F1Score('macro'), FBetaScore('micro')]`", _f_scores, "metrics.F1Score metrics.FBetaScore"),
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
    *(
        Case(
            f"`{name}={value}`",
            lambda side, options=options: trained(side, **options),  # type: ignore[misc]
            f"compile.{name}",
        )
        for name, value, options in (
            ("run_eagerly", True, {"run_eagerly": True}),
            ("run_eagerly", False, {"run_eagerly": False}),
            ("jit_compile", True, {"run_eagerly": False, "jit_compile": True}),
            ("steps_per_execution", 3, {"run_eagerly": False, "steps_per_execution": 3}),
            ("auto_scale_loss", False, {"auto_scale_loss": False}),
        )
    ),
    Case("`optimizer='rmsprop'`, by its name", lambda side: trained(side, optimizer="rmsprop"), "compile.optimizer"),
]
