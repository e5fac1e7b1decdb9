"""Every optimizer of `keras.optimizers`, with arguments that differ from its defaults."""

from collections.abc import Callable

import keras

from elastable.embedding_store.optimizers.fused import FUSED
from elastable.master.model.keras_optimizer import FUSED_CLASSES
from tests.contracts.reference_rows import REFERENCES
from tests.keras_table.case import Case, trained
from tests.untyped import Keyword, Keywords


def _variants(name: str) -> list[dict[str, float]]:
    """The arguments with which a fused optimizer is tried; `weight_decay` has cases of its own."""
    decays = FUSED[name].defaults["weight_decay"] > 0
    return [
        {key: value for key, value in values.items() if decays or key != "weight_decay"}
        for values in REFERENCES[name].trained[1:]
    ]


_OWN: dict[str, list[dict[str, Keyword]]] = {
    **{kind.__name__: _variants(name) for kind, name in FUSED_CLASSES.items()},
    "Adafactor": [
        {"learning_rate": 0.1, "beta_2_decay": -0.7, "epsilon_1": 1e-20, "epsilon_2": 1e-2, "clip_threshold": 0.5},
        {"learning_rate": 0.1, "relative_step": False},
    ],
    "Lamb": [{"learning_rate": 0.01, "beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-4}],
    "Muon": [{"learning_rate": 0.01}],
    "ScheduleFreeAdamW": [{"learning_rate": 0.01, "beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-4, "warmup_steps": 2}],
}
_COMMON: list[tuple[str, dict[str, object]]] = [
    ("SGD", {"learning_rate": 0.5, "clipnorm": 0.05}),
    ("SGD", {"learning_rate": 0.5, "global_clipnorm": 0.05}),
    ("SGD", {"learning_rate": 0.5, "clipvalue": 0.01}),
    ("SGD", {"learning_rate": 0.5, "weight_decay": 0.1}),
    ("Adam", {"learning_rate": 0.01, "weight_decay": 0.1}),
    ("SGD", {"learning_rate": 0.5, "use_ema": True, "ema_momentum": 0.8}),
    ("SGD", {"learning_rate": 0.5, "use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}),
    ("SGD", {"learning_rate": 0.5, "loss_scale_factor": 8.0}),
    ("SGD", {"learning_rate": 0.5, "gradient_accumulation_steps": 3}),
    ("SGD", {"learning_rate": 0.5, "name": "mine"}),
]
_HALF = {"initial_learning_rate": 0.5}
_SCHEDULES = {
    "CosineDecay": dict(_HALF, decay_steps=4, alpha=0.1, warmup_target=0.8, warmup_steps=1),
    "CosineDecayRestarts": dict(_HALF, first_decay_steps=2, t_mul=1.5, m_mul=0.5, alpha=0.1),
    "ExponentialDecay": {"initial_learning_rate": 0.5, "decay_steps": 2, "decay_rate": 0.5, "staircase": True},
    "InverseTimeDecay": {"initial_learning_rate": 0.5, "decay_steps": 2, "decay_rate": 0.5},
    "PiecewiseConstantDecay": {"boundaries": [1, 2], "values": [0.5, 0.3, 0.1]},
    "PolynomialDecay": {"initial_learning_rate": 0.5, "decay_steps": 2, "power": 2.0, "cycle": True},
}


def _said(name: str, arguments: dict[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _with(optimizer: Callable[[], object], epochs: int = 1) -> Callable[..., object]:
    return lambda side: trained(side, optimizer=optimizer(), fit={"epochs": epochs})


def _optimizer(name: str, arguments: Keywords) -> Case:
    covers = " ".join([f"optimizers.{name}", *(f"optimizers.{name}.{key}" for key in arguments)])
    # Averages differ from the rows after some steps only.
    program = _with(lambda: getattr(keras.optimizers, name)(**arguments), 2 if "use_ema" in arguments else 1)
    return Case(f"`{_said(name, arguments)}`", program, covers)


def _schedule(name: str, arguments: dict[str, object]) -> Case:
    def optimizer() -> keras.optimizers.SGD:
        return keras.optimizers.SGD(getattr(keras.optimizers.schedules, name)(**arguments))

    return Case(f"`SGD({_said(name, arguments)})`", _with(optimizer), f"schedules.{name}")


def _two_optimizers() -> object:
    default, other = keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.1)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(default, {"out/.*": other}))


@keras.saving.register_keras_serializable("keras_table")
class Halved(keras.optimizers.SGD):
    def update_step(
        self, gradient: keras.KerasTensor, variable: keras.Variable, learning_rate: keras.KerasTensor
    ) -> None:
        super().update_step(gradient * 0.5, variable, learning_rate)


CASES = [
    *(_optimizer(name, arguments) for name, all_of_them in _OWN.items() for arguments in all_of_them),
    *(
        Case(case.name, case.program, " ".join([case.covers, *(f"Optimizer.{key}" for key in arguments)]))
        for name, arguments in _COMMON
        for case in [_optimizer(name, arguments)]
    ),
    *(_schedule(name, arguments) for name, arguments in _SCHEDULES.items()),  # type: ignore[arg-type]
    Case("`SGD(lambda: 0.3)`", _with(lambda: keras.optimizers.SGD(lambda: 0.3))),
    Case(
        "`LossScaleOptimizer(SGD(0.5))`",
        _with(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)),
        "optimizers.LossScaleOptimizer",
    ),
    Case(
        "`MultiOptimizer(OptimizerMap(SGD(0.5), {'out/.*': SGD(0.1)}))`",
        _with(_two_optimizers),
        "optimizers.MultiOptimizer optimizers.OptimizerMap",
    ),
    Case("a subclass of `SGD` with an `update_step` of its own", _with(lambda: Halved(0.5)), "optimizers.Optimizer"),
]
