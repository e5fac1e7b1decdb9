"""A Keras program drawn from a seed: its data, layers, loss, optimizer, callbacks, and what it does with weights.

Programs keep to what is promised to be Keras' numbers: where an optimizer moves rows that no batch touches, tables have
`lazy=False` or every batch touches every row; ids that repeat in a batch are summed on both sides (docs/fit.md).
Dropout draws of its own and BatchNormalization over micro-batches are left out: both are said to differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.master.backend.contract import BackendTensor
from elastable.master.backend.lazy import tf
from elastable.master.model.keras_optimizer import FUSED_CLASSES
from tests.contracts.reference_rows import REFERENCES
from tests.keras_table.case import Side
from tests.keras_table.weight_cases import Penalised

__all__ = ["DrawnProgram", "Features", "Side"]

ROWS, DIM, LENGTH, RECORDS, BATCH = 12, 3, 4, 30, 12
Features = npt.NDArray[np.int64] | dict[str, npt.NDArray[np.int64]]

# By name: whether untouched rows stay where they are, or move and lazy=False follows; else every row is touched.
STAY, FOLLOW, TOUCH = "stay", "follow", "touch"


def _untouched(name: str) -> str:
    """What an optimizer does to rows that no batch touches."""
    form = FUSED[name](OptimizerSpec(name, ())).without_gradient()
    return TOUCH if form is None else STAY if form.still else FOLLOW


_OPTIMIZERS: dict[str, tuple[str, Callable[..., keras.Optimizer]]] = {
    **{name: (_untouched(name), partial(kind, REFERENCES[name].rate)) for kind, name in FUSED_CLASSES.items()},
    "momentum": (FOLLOW, partial(keras.optimizers.SGD, 0.1, momentum=0.9)),
    "nesterov": (FOLLOW, partial(keras.optimizers.SGD, 0.1, momentum=0.5, nesterov=True)),
    "amsgrad": (FOLLOW, partial(keras.optimizers.Adam, 0.01, amsgrad=True)),
    "lamb": (FOLLOW, partial(keras.optimizers.Lamb, 0.01)),
}
_CLIPPED: tuple[dict[str, object], ...] = ({"clipnorm": 0.1}, {"global_clipnorm": 0.2}, {"clipvalue": 0.02})
_MORE: tuple[dict[str, object], ...] = ({"use_ema": True}, {"gradient_accumulation_steps": 3}, {"weight_decay": 0.01})
_REGRESSION = "mse mae huber log_cosh mean_squared_logarithmic_error cosine_similarity own masked"
_BINARY = "binary_crossentropy hinge squared_hinge poisson binary_focal_crossentropy dice kl_divergence"
_METRICS = {"regression": ("mae", "mse", "r2_score", "cosine_similarity"), "binary": ("auc", "accuracy", "precision")}
_BODIES = "flat mean sum lstm attention norm conv max masked_mean multiply"
_USES = "nothing folds copy clone file weights_file polyak frozen checkpoint halved again"
_CALLBACKS = "none schedule best averages plateau stop halving best_weights"


@dataclass
class DrawnProgram:
    """What was drawn; `str()` shows it.

    Args:
        seed: Decides everything.
    """

    seed: int
    waits: int = field(init=False)
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)

        def one(of: str | tuple[str, ...]) -> str:
            return str(draw.choice(of.split() if isinstance(of, str) else of))

        self.waits = int(draw.integers(1, 5))
        self.kind = one(("regression", "regression", "binary"))
        self.loss = one(_REGRESSION if self.kind == "regression" else _BINARY)
        self.reduction = one(("sum_over_batch_size",) * 3 + ("sum", "mean_with_sample_weight"))
        self.overrides = one(("none",) * 5 + ("compute_loss", "add_loss", "penalty"))
        self.optimizer = one(tuple(_OPTIMIZERS))
        self.options: dict[str, object] = {}
        if draw.random() < 0.25:
            self.options |= _CLIPPED[int(draw.integers(len(_CLIPPED)))]
        if draw.random() < 0.15:
            self.options |= _MORE[int(draw.integers(len(_MORE)))]
        self.schedule = bool(draw.random() < 0.15)
        self.units = int(draw.integers(1, 3))
        self.metrics = tuple(name for name in _METRICS[self.kind] if draw.random() < 0.3)
        if self.loss == "cosine_similarity":
            self.units = 2
        if self.units == 1:  # of one number the cosine is its sign, which rounding turns
            self.metrics = tuple(name for name in self.metrics if name != "cosine_similarity")
        self.body, self.second = one(_BODIES), one(("none", "none", "shared", "other", "numbers"))
        self.layer = one(("et", "et", "keras"))
        self.mask_zero = bool(draw.random() < 0.25)
        self.constraint = one(("none",) * 8 + ("non_neg", "unit_norm"))
        self.regularizer = one(("none",) * 8 + ("l2", "l1"))
        self.policy = one(("float32",) * 6 + ("mixed_bfloat16",))
        self.sample_weight, self.validation = bool(draw.random() < 0.3), bool(draw.random() < 0.3)
        self.epochs, self.use, self.callback = int(draw.integers(1, 4)), one(_USES), one(_CALLBACKS)
        self.input_dtype = one(("int64", "int64", "int32", "float32"))
        self.every_row = (
            _OPTIMIZERS[self.optimizer][0] == TOUCH
            or self.constraint != "none"
            or self.regularizer != "none"
            or "use_ema" in self.options
        )
        if _OPTIMIZERS[self.optimizer][0] == FOLLOW and self.every_row:
            self.optimizer = "adagrad"
        if self.schedule and self.callback in ("schedule", "plateau"):
            self.callback = "none"  # a schedule's rate is not assigned
        if self.policy != "float32":
            self.metrics = ()  # which Keras cannot compute from halves
        if self.optimizer == "ftrl" and self.body == "max":
            self.body = "mean"  # its rows come near 0, where rounding decides which is the largest
        if self.optimizer == "ftrl" and self.constraint == "unit_norm":
            self.constraint = "none"  # its rows come near 0, and their norm makes much of rounding
        signs = self.loss in ("mae", "hinge") or self.overrides == "compute_loss"
        if signs and _OPTIMIZERS[self.optimizer][0] != STAY:
            self.waits = 1  # gradients of one size that cancel out leave rounding, which a moment makes a whole step of
        if "gradient_accumulation_steps" in self.options:
            self.waits = 1  # together they are refused, as is a number that does not divide an epoch
        read = self.loss not in ("own", "masked", "dice") and self.reduction == "sum_over_batch_size"
        read = read and self.overrides == "none" and self.regularizer == "none"
        if keras.config.backend() != "tensorflow" and not read:
            self.waits = 1  # by what such a loss is divided is known of TensorFlow's graphs alone: it is refused
        if "weight_decay" in self.options and not self.every_row and self.optimizer in ("sgd", "adagrad", "adamw"):
            del self.options["weight_decay"]
        self._data(draw)

    def _data(self, draw: np.random.Generator) -> None:
        ids = draw.integers(0, ROWS, (RECORDS, LENGTH))
        if self.every_row:  # each batch, and what is left of the last one, has every row
            for first in range(0, RECORDS, BATCH):
                part = ids[first : first + BATCH]
                places = draw.permutation(part.size)[:ROWS]
                part.reshape(-1)[places] = np.arange(ROWS) if part.size >= ROWS else 0
        other = ids[:, ::-1].copy() if self.second in ("shared", "other") else None
        self.x: Features = ids.astype(np.int64)
        if other is not None:
            self.x = {"one": self.x, "two": other.astype(np.int64)}
        elif self.second == "numbers":
            self.x = {"one": self.x, "two": draw.normal(size=(RECORDS, 2)).astype(np.float32)}
        size = (RECORDS, self.units)
        y = draw.normal(size=size) if self.kind == "regression" else draw.integers(0, 2, size)
        self.y = np.abs(y).astype(np.float32) if "logarithmic" in self.loss else y.astype(np.float32)
        left_out = draw.random(RECORDS) < (0.4 if self.loss == "masked" else 0.0)
        if keras.config.backend() != "tensorflow":
            left_out[::BATCH] = False  # what 0/0 gives depends on what XLA makes of a program: zeros, or NaN
        self.y[left_out] = -1.0
        self.weights = draw.uniform(0.0, 2.0, RECORDS).astype(np.float32) if self.sample_weight else None
        self.matrix = [draw.normal(size=(ROWS, DIM)).astype(np.float32) for _ in range(2)]
        self.dense_seed = int(draw.integers(1 << 30))

    def __str__(self) -> str:
        skipped = ("x", "y", "weights", "matrix")
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name not in skipped)

    @property
    def lazy(self) -> bool | None:
        """Of the tables in a store."""
        return _OPTIMIZERS[self.optimizer][0] != FOLLOW

    def embedding(self, side: Side, number: int) -> keras.layers.Layer:
        import elastable as et

        options: dict[str, Any] = {"mask_zero": self.mask_zero, "name": f"table_{number}"}
        options["weights"] = self.matrix[number]
        if self.constraint != "none":
            unit_norm = keras.constraints.UnitNorm(axis=1)
            options["embeddings_constraint"] = unit_norm if self.constraint == "unit_norm" else self.constraint
        if self.regularizer != "none":
            options["embeddings_regularizer"] = self.regularizer
        ours = side.stored and self.layer == "et"
        return (et.Embedding if ours else keras.layers.Embedding)(ROWS, DIM, **options)

    def model(self, side: Side) -> keras.Model:
        """The model, compiled, with the same weights on both sides."""
        keras.utils.set_random_seed(self.dense_seed)
        one = keras.Input((LENGTH,), dtype=self.input_dtype, name="one")
        table = self.embedding(side, 0)
        hidden, inputs = _body(self.body, table, one), {"one": one}
        if self.second != "none":
            numbers = self.second == "numbers"
            two = keras.Input((2 if numbers else LENGTH,), dtype="float32" if numbers else self.input_dtype, name="two")
            inputs["two"] = two
            other = (
                two if numbers else _body("mean", table if self.second == "shared" else self.embedding(side, 1), two)
            )
            hidden = keras.layers.Concatenate()([hidden, other])
        if self.overrides == "add_loss":
            hidden = Extra(name="extra")(hidden)
        activation = None if self.kind == "regression" and "logarithmic" not in self.loss else "sigmoid"
        out = keras.layers.Dense(self.units, activation, dtype="float32", name="out")(hidden)
        kind = {"compute_loss": OwnLoss, "penalty": Penalised}.get(self.overrides, keras.Model)
        model = kind(inputs if len(inputs) > 1 else one, out)
        self.compiled(model, side)
        return model

    def compiled(self, model: keras.Model, side: Side) -> None:
        optimizer = _OPTIMIZERS[self.optimizer][1](**self.options)
        if self.schedule:
            rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.7)
            optimizer = type(optimizer).from_config(
                {**optimizer.get_config(), "learning_rate": keras.optimizers.schedules.serialize(rate)}
            )
        eager = not side.stored or (self.waits == 1 and self.seed % 2 == 0)  # quicker than a trace
        own = self.overrides in ("compute_loss", "penalty")
        metrics = [] if own else [_metric(name) for name in self.metrics]
        model.compile(optimizer, None if own else self._loss(), metrics=metrics, run_eagerly=eager)

    def _loss(self) -> object:
        if self.loss in ("own", "masked"):
            return {"own": _own_loss, "masked": _masked_loss}[self.loss]
        loss = keras.losses.get(self.loss)
        if isinstance(loss, keras.losses.Loss):
            return loss
        kind = next((each for each in vars(keras.losses).values() if _is_class_of(each, self.loss)), None)
        return self.loss if kind is None else kind(reduction=self.reduction)


def _is_class_of(each: object, name: str) -> bool:
    if not (isinstance(each, type) and issubclass(each, keras.losses.Loss)):
        return False
    wanted = name.replace("_", "")
    return each.__name__.lower() in (wanted, {"mse": "meansquarederror", "mae": "meanabsoluteerror"}.get(name, ""))


def _metric(name: str) -> object:
    known = {"auc": keras.metrics.AUC, "precision": keras.metrics.Precision, "r2_score": keras.metrics.R2Score}
    return known[name](name=name) if name in known else name


def _body(kind: str, table: keras.layers.Layer, ids: keras.KerasTensor) -> keras.KerasTensor:
    rows, layers = table(ids), keras.layers
    if kind == "lstm":
        return layers.LSTM(2)(rows)
    if kind == "attention":
        return layers.GlobalAveragePooling1D()(layers.Attention()([rows, rows]))
    if kind == "norm":
        return layers.Flatten()(layers.LayerNormalization()(rows))
    if kind == "conv":
        return layers.GlobalMaxPooling1D()(layers.Conv1D(2, 2)(rows))
    if kind == "mean":
        return layers.GlobalAveragePooling1D()(rows)
    if kind == "sum":
        return keras.ops.sum(rows, axis=1)
    if kind == "max":
        return keras.ops.max(rows, axis=1)
    if kind == "masked_mean":
        kept = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(ids, 0), rows.dtype), -1)
        return keras.ops.sum(rows * kept, axis=1) / (keras.ops.sum(kept, axis=1) + 1.0)
    if kind == "multiply":
        return layers.Flatten()(rows * keras.ops.tanh(rows[:, ::-1]))
    return layers.Flatten()(rows)


@keras.saving.register_keras_serializable("keras_programs")
class Extra(keras.layers.Layer):
    def call(self, hidden: BackendTensor) -> BackendTensor:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(hidden)))
        return hidden


@keras.saving.register_keras_serializable("keras_programs")
class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        error = keras.ops.mean(keras.ops.abs(y - y_pred), axis=-1)
        return keras.ops.mean(error if sample_weight is None else error * keras.ops.reshape(sample_weight, (-1,)))


@keras.saving.register_keras_serializable("keras_programs")
def _own_loss(true: BackendTensor, predicted: BackendTensor) -> BackendTensor:
    return keras.ops.mean(keras.ops.power(keras.ops.abs(true - predicted) + 0.1, 1.5), axis=-1)


@keras.saving.register_keras_serializable("keras_programs")
def _masked_loss(true: BackendTensor, predicted: BackendTensor) -> BackendTensor:
    if keras.config.backend() == "tensorflow":
        return tf.reduce_mean(tf.boolean_mask(tf.square(true - predicted), true > -0.99))
    kept = keras.ops.cast(true > -0.99, predicted.dtype)  # JAX has no tensors of unknown length
    return keras.ops.sum(keras.ops.square(true - predicted) * kept) / keras.ops.sum(kept)
