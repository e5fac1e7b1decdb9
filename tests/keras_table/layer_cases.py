"""What `keras.layers.Embedding`, `keras.Layer` and `et.Embedding` take, and what layers around a table may do."""

from collections.abc import Callable
from functools import partial

import keras
import numpy as np

from tests.keras_table.case import BATCH, DIM, LENGTH, Case, OwnLoss, Side, arguments_in, around, flat, small, trained
from tests.untyped import Keywords


def _own(side: Side, *arguments: object, **options: object) -> keras.Model:
    """A model around `et.Embedding`; with the rows of `weights=` where they are to be the same."""
    table = side.embedding(*(arguments or (side.vocabulary, DIM)), **{"name": "items", **options})
    return around(table, keras.layers.Flatten(), keras.layers.Dense(1, name="out"))


def _rows(side: Side) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(side.vocabulary, DIM)).astype(np.float32)


def _both(name: str, covers: str, option: Callable[[], Keywords] | None = None, **more: object) -> list[Case]:
    """The option, as the name says it, on an offloaded `keras.layers.Embedding`, and on `et.Embedding`."""
    option = partial(arguments_in, name) if option is None else option
    return [
        Case(f"`keras.layers.Embedding({name})`", lambda side: trained(side, small(side, **option()), **more), covers),
        Case(
            f"`et.Embedding({name})`",
            lambda side: trained(side, _own(side, **{"weights": [_rows(side)], **option()}), **more),
            covers,
        ),
    ]


def _initializer(initializer: Callable[[], object], name: str, meaning: str) -> Case:
    def program(side: Side) -> object:
        model = _own(side, side.vocabulary, 64, embeddings_initializer=initializer())
        result = trained(side, model, optimizer=keras.optimizers.SGD(0.0))
        if not meaning:
            return result
        rows = result["weights"]["items"][0]
        return [round(float(np.abs(rows).mean()), 1), round(float(rows.mean()), 1), float(np.ptp(rows) > 0)]

    return Case(f"`et.Embedding(embeddings_initializer={name})`", program, "Embedding.embeddings_initializer", meaning)


def _masked(side: Side, layer: Callable[..., keras.layers.Layer]) -> object:
    """Zeros are padding; the mask goes through a recurrent layer to the loss."""
    ids = keras.Input((None,), dtype="int64", name="ids")
    own = {} if layer is keras.layers.Embedding else {"weights": [_rows(side)]}
    rows = layer(side.vocabulary, DIM, mask_zero=True, name="items", **own)(ids)
    states = keras.layers.SimpleRNN(3, return_sequences=True, name="states")(rows)
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(states))
    x = side.x.copy()
    x[:, 2] = np.where(np.arange(len(x)) % 3 == 0, 0, x[:, 2])
    y = np.repeat(side.y, LENGTH, axis=1)[..., None]
    return trained(side, model, x=x, y=y, metrics=["mae"], weighted_metrics=["mse"])


def _frozen_then_not(side: Side) -> list[object]:
    model = small(side)
    frozen = trained(side, model, fit={"epochs": 1})
    model.get_layer("items").trainable = False
    again = trained(side, model)
    model.get_layer("items").trainable = True
    return [frozen, again, trained(side, model)]


def _shared(side: Side) -> object:
    layer = keras.layers.Embedding(side.vocabulary, DIM, name="items")
    features = [keras.Input((LENGTH,), dtype="int64", name=name) for name in ("seen", "bought")]
    flat = [keras.layers.Flatten()(layer(feature)) for feature in features]
    model = keras.Model(features, keras.layers.Dense(1, name="out")(keras.layers.Concatenate()(flat)))
    return trained(side, model, x=[side.x, side.x[:, ::-1].copy()])


def _with_losses(side: Side) -> object:
    class Penalty(keras.layers.Layer):
        def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
            return inputs

    return trained(side, flat(side, Penalty()))


def _regularized(side: Side) -> object:
    table = keras.layers.Embedding(side.vocabulary, DIM, name="items")
    dense = keras.layers.Dense(
        1, name="out", kernel_regularizer="l2", activity_regularizer="l1", kernel_constraint="unit_norm"
    )
    return trained(side, around(table, keras.layers.Flatten(), dense))


def _penalised(side: Side) -> keras.Model:
    return _own(side, weights=[_rows(side)], embeddings_regularizer="l2")


def _evaluated_with_a_penalty(side: Side) -> object:
    model = _penalised(side)
    return [trained(side, model), model.evaluate(side.x, side.y, batch_size=BATCH, verbose=0)]


def _without_losses(side: Side) -> object:
    model = _penalised(side)
    return trained(side, OwnLoss(model.inputs, model.outputs), loss=None)


def _dropout(side: Side) -> list[object]:
    """Half of the outputs are dropped; the loss stays one, and the weights move."""
    result = trained(side, flat(side, keras.layers.Dropout(0.5, seed=1)), fit={"epochs": 2})
    return [float(np.isfinite(result["history"]["loss"]).all()), sorted(result["weights"])]


def _added_weight(side: Side) -> object:
    class Scaled(keras.layers.Layer):
        def build(self, shape: tuple[None, int]) -> None:
            self.scale = self.add_weight(
                shape=(1,), initializer="ones", regularizer="l2", constraint="non_neg", name="scale"
            )
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

        def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
            self.calls.assign_add(1.0)
            return inputs * self.scale

    return trained(side, flat(side, Scaled(name="scaled")))


def _policy(policy: str) -> Callable[[Side], object]:
    def program(side: Side) -> object:
        keras.config.set_dtype_policy(policy)
        return trained(side)

    return program


def _repeated_ids(optimizer: Callable[[], keras.optimizers.Optimizer]) -> Callable[[Side], object]:
    def program(side: Side) -> object:
        x = side.x.copy()
        x[:, 1] = x[:, 0]
        return trained(side, x=x, optimizer=optimizer())

    return program


def _float_ids(own: bool, dtype: str, cut: float = 0.0) -> Callable[[Side], object]:
    """Ids as floats, in front of an input of that dtype."""

    def program(side: Side) -> object:
        layer = side.embedding if own else keras.layers.Embedding
        table = layer(side.vocabulary, DIM, name="items", **({"weights": [_rows(side)]} if own else {}))
        model = around(table, keras.layers.Flatten(), keras.layers.Dense(1, name="out"), dtype=dtype)
        return trained(side, model, x=side.x.astype("float32" if dtype == "float32" else "float64") + cut)

    return program


def _lora(side: Side) -> object:
    model = small(side)
    model.get_layer("items").enable_lora(2)
    return trained(side, model)


def _quantized(side: Side) -> object:
    model = small(side)
    model.get_layer("items").quantize("int8")
    return trained(side, model)


_SEVERAL = (
    "the same distribution; the draws differ, as a row's initial value is a function of seed, table, id and column"
)
CASES = [
    *_both("30, 4", "Embedding.input_dim", dict),
    Case(
        "`et.Embedding(weights=[rows])`",
        lambda side: trained(side, _own(side, weights=[_rows(side)])),
        "Embedding.weights Embedding.output_dim",
    ),
    _initializer(lambda: keras.initializers.Constant(0.2), "Constant(0.2)", ""),
    _initializer(lambda: "zeros", "'zeros'", ""),
    _initializer(lambda: "uniform", "'uniform'", _SEVERAL),
    _initializer(lambda: keras.initializers.RandomNormal(0.5, 0.3), "RandomNormal(0.5, 0.3)", _SEVERAL),
    _initializer(lambda: "glorot_uniform", "'glorot_uniform'", _SEVERAL),
    _initializer(lambda: "orthogonal", "'orthogonal'", _SEVERAL),
    Case("`evaluate(...)` with `embeddings_regularizer='l2'`", _evaluated_with_a_penalty),
    Case("`embeddings_regularizer='l2'`, and a `compute_loss` that leaves `self.losses` out", _without_losses),
    *_both("embeddings_regularizer='l2'", "Embedding.embeddings_regularizer"),
    *_both("embeddings_constraint='non_neg'", "Embedding.embeddings_constraint"),
    *_both(
        "embeddings_constraint='unit_norm'",
        "Embedding.embeddings_constraint",
        lambda: {"embeddings_constraint": keras.constraints.UnitNorm(axis=1)},
    ),
    *_both("activity_regularizer='l2'", "Layer.activity_regularizer"),
    *_both("trainable=False", "Layer.trainable"),
    *_both("dtype='mixed_bfloat16'", "Layer.dtype"),
    *_both("dtype='float64'", "Layer.dtype"),
    *_both("autocast=False", "Layer.autocast"),
    *(
        Case(
            f"`{kind}.Embedding(lora_rank=2, lora_alpha=4)`",
            lambda side, model=model: trained(side, model(side, lora_rank=2, lora_alpha=4)),  # type: ignore[misc]
            "Embedding.lora_rank Embedding.lora_alpha",
        )
        for kind, model in (("keras.layers", small), ("et", _own))
    ),
    *_both(
        "quantization_config",
        "Embedding.quantization_config",
        lambda: {"quantization_config": keras.quantizers.Int8QuantizationConfig()},
    ),
    *(
        Case(
            f"`{name}.Embedding(mask_zero=True)`, a recurrent layer, outputs with a mask",
            lambda side, own=own: _masked(side, side.embedding if own else keras.layers.Embedding),  # type: ignore[misc]
            "Embedding.mask_zero",
        )
        for name, own in (("keras.layers", False), ("et", True))
    ),
    Case("`layer.enable_lora(2)`", _lora, "Embedding.enable_lora"),
    Case("`layer.quantize('int8')`", _quantized, "Embedding.quantize"),
    Case("`layer.trainable = False` after a fit, and `True` after the next", _frozen_then_not, "Layer.trainable"),
    Case("one embedding called on two features", _shared, "Layer.name"),
    *(
        Case(f"`keras.Input((3,))` of floats in front of `{name}.Embedding`", _float_ids(own, "float32"))
        for name, own in (("keras.layers", False), ("et", True))
    ),
    Case('ids of doubles for `keras.Input((3,), dtype="int64")`', _float_ids(True, "int64")),
    Case("ids of floats with a fraction, which Keras cuts off", _float_ids(False, "float32", 0.25)),
    Case("an id several times in a batch, `SGD(0.5)`", _repeated_ids(lambda: keras.optimizers.SGD(0.5))),
    *(
        Case(f"an id several times in a batch, `{named}`", _repeated_ids(optimizer), repeats=True)
        for named, optimizer in (
            ("Adagrad(0.1)", lambda: keras.optimizers.Adagrad(0.1)),
            ("SGD(clipvalue=0.01)", lambda: keras.optimizers.SGD(0.5, clipvalue=0.01)),
            ("SGD(clipnorm=0.1)", lambda: keras.optimizers.SGD(0.5, clipnorm=0.1)),
        )
    ),
    Case("`self.add_loss(...)` in a layer", _with_losses, "Layer.add_loss"),
    Case(
        "`kernel_regularizer`, `activity_regularizer`, `kernel_constraint` of dense layers",
        _regularized,
        "Layer.activity_regularizer",
    ),
    Case(
        "`BatchNormalization`, with `grads_to_wait=1`",
        lambda side: trained(side, flat(side, keras.layers.BatchNormalization(name="normal"))),
    ),
    Case(
        "`Dropout(0.5, seed=1)`",
        _dropout,
        "",
        "draws of its own, which depend on nothing but `seed` and the number of the micro-batch",
    ),
    Case(
        "`self.add_weight(...)`, trainable and not, with regularizer and constraint", _added_weight, "Layer.add_weight"
    ),
    *(
        # XLA keeps the products of a fusion in 32 bits, which plain Keras, whose fusions are others, rounds to 16.
        Case(f"`keras.config.set_dtype_policy('{policy}')`", _policy(policy), "Layer.dtype", on_jax=on_jax)
        for policy, on_jax in (("mixed_bfloat16", 1e-3), ("mixed_float16", 1e-4), ("float64", 1e-5))
    ),
]
