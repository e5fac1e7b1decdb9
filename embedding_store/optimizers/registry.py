"""The row optimizer of a spec: fused ones by Keras' names, and those that are registered."""

from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.optimizers.base import DenseForm, Factory, RowOptimizer
from elastable.embedding_store.optimizers.fused import FUSED, adam_rate, float32_power

_Values = Mapping[str, float]


def dense_form(optimizer: RowOptimizer) -> DenseForm:
    """The dense form of an optimizer.

    Raises:
        Unsupported: it has none here; named are those that have.
        BadSpec: a hyperparameter with which the dense sum has no end, or is no number.
    """
    make = _FORMS.get(optimizer.spec.name)
    if make is None:
        raise Unsupported(
            f"optimizer {optimizer.shown_name!r} has no dense-equivalent form, so lazy=False cannot be kept; "
            f"leave lazy=True, or give the table one of {', '.join(known_dense_forms())} "
            "(et.Embedding(optimizer=))"
        )
    form = make(optimizer.hyperparameters)
    name, moving = optimizer.shown_name, form.moving
    if moving >= 0 and form.factors[moving] >= 1:
        raise BadSpec(f"optimizer {name!r}: with lazy=False its momentum (beta_1) must stay below 1")
    if form.divisor >= 0 and not (form.epsilon > 0 and form.factors[form.divisor] > 0):
        raise BadSpec(f"optimizer {name!r}: lazy=False needs epsilon and beta_2 above 0; else Keras divides 0 by 0")
    return form


def known_dense_forms() -> tuple[str, ...]:
    """Names of the optimizers that have a dense form, sorted."""
    return tuple(sorted(_FORMS))


def _kept(share: float) -> float:
    """What is left of a moment after `m += (0 - m) * (1 - beta)`, with 1 - beta in float32 as in Keras."""
    return 1.0 - float(np.float32(1 - share))


def _single(value: float) -> float:
    return float(np.float32(value))


def _sgd(values: _Values) -> DenseForm:
    decay, momentum = _single(values["weight_decay"]), _single(values["momentum"])
    if not momentum:
        return DenseForm((), decay=decay)
    share = momentum if values["nesterov"] else 1.0
    return DenseForm((momentum,), 0, lambda step, rate: share, decay=decay)


def _adagrad(values: _Values) -> DenseForm:
    return DenseForm((1.0,), decay=_single(values["weight_decay"]))


def _rowwise_adagrad(values: _Values) -> DenseForm:
    return DenseForm((), decay=_single(values.get("weight_decay", 0.0)))


def _adadelta(values: _Values) -> DenseForm:
    rho = _single(values["rho"])
    return DenseForm((rho, rho), decay=_single(values["weight_decay"]))


def _rmsprop(values: _Values) -> DenseForm:
    rho, momentum, decay = _single(values["rho"]), _single(values["momentum"]), _single(values["weight_decay"])
    centered = (rho,) if values["centered"] else ()
    if not momentum:
        return DenseForm((rho, *centered), decay=decay)
    return DenseForm((rho, momentum, *centered), 1, lambda step, rate: -1.0, decay=decay)


def _adam(values: _Values) -> DenseForm:
    beta_1, beta_2 = values["beta_1"], values["beta_2"]
    peaks = (1.0,) if values["amsgrad"] else ()

    def scale(step: int, rate: float) -> float:
        return -float(adam_rate(beta_1, beta_2, step, np.float32(rate)))

    factors, decay = (_kept(beta_1), _kept(beta_2), *peaks), _single(values["weight_decay"])
    return DenseForm(factors, 0, scale, len(factors) - 1, True, _single(values["epsilon"]), decay)


def _adamax(values: _Values) -> DenseForm:
    beta_1 = values["beta_1"]

    def scale(step: int, rate: float) -> float:
        return -float(np.float32(rate)) / float(np.float32(1) - float32_power(beta_1, step + 1))

    factors, decay = (_kept(beta_1), _single(values["beta_2"])), _single(values["weight_decay"])
    return DenseForm(factors, 0, scale, 1, False, _single(values["epsilon"]), decay)


_FORMS: Mapping[str, Callable[[_Values], DenseForm]] = {
    "adadelta": _adadelta,
    "adagrad": _adagrad,
    "adam": _adam,
    "adamax": _adamax,
    "adamw": _adam,
    "rmsprop": _rmsprop,
    "rowwise_adagrad": _rowwise_adagrad,
    "sgd": _sgd,
}


_registered: dict[str, Factory] = {}


def register_row_optimizer(name: str, factory: Factory) -> None:
    """Makes `row_optimizer` use `factory` for specs of that name.

    The factory raises `BadSpec` for hyperparameters it does not know. Registering a name again replaces it.
    """
    _registered[name] = factory
    row_optimizer.cache_clear()


def known_row_optimizers() -> tuple[str, ...]:
    """Names that `row_optimizer` knows now, sorted."""
    return tuple(sorted({*FUSED, *_registered}))


@lru_cache(maxsize=256)
def row_optimizer(spec: OptimizerSpec) -> RowOptimizer:
    """The optimizer that a spec describes.

    Raises:
        BadSpec: unknown name or hyperparameter (the known ones are listed), or a value out of range.
        Unsupported: `lazy=False` of an optimizer that has no dense form.
    """
    factory = _registered.get(spec.name) or FUSED.get(spec.name)
    if factory is None:
        raise BadSpec(f"unknown optimizer {spec.name!r} (known optimizers: {', '.join(known_row_optimizers())})")
    optimizer = factory(spec)
    if not spec.lazy:
        form = dense_form(optimizer)
        optimizer.dense_form = None if form.still else form
    return optimizer


def same_slots(one: OptimizerSpec, other: OptimizerSpec) -> bool:
    """Whether one trains on with the slots of the other, whatever its hyperparameters are, as Keras' optimizers do."""
    layouts = [[(slot.name, slot.columns) for slot in row_optimizer(spec).slots] for spec in (one, other)]
    return layouts[0] == layouts[1]


def follows_steps(spec: OptimizerSpec) -> bool:
    """Whether steps move rows that have no gradient: `lazy=False`, of an optimizer for which that is another thing."""
    return not spec.lazy and row_optimizer(spec).dense_form is not None


def decays_untouched_rows(spec: OptimizerSpec) -> bool:
    """Whether weight decay reaches rows that were never updated: `lazy=False` with `weight_decay`."""
    form = row_optimizer(spec).dense_form
    return form is not None and form.decay != 0
