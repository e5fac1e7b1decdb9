"""The row optimizer of a spec: fused ones by Keras' names, and those that are registered."""

import json
from functools import lru_cache

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.optimizers.base import KERAS_BLOCK, DenseForm, Factory, RowOptimizer
from elastable.embedding_store.optimizers.fused import FUSED


def dense_form(optimizer: RowOptimizer) -> DenseForm:
    """The dense form of an optimizer.

    Raises:
        Unsupported: it has none here; named are those that have.
        BadSpec: a hyperparameter with which the dense sum has no end, or is no number.
    """
    form = optimizer.without_gradient()
    if form is None:
        raise Unsupported(
            f"optimizer {optimizer.shown_name!r} has no dense-equivalent form, so lazy=False cannot be kept; "
            f"leave lazy=True, or give the table one of {', '.join(known_dense_forms())} "
            "(et.Embedding(optimizer=))"
        )
    name, moving = optimizer.shown_name, form.moving
    if moving >= 0 and form.factors[moving] >= 1:
        raise BadSpec(f"optimizer {name!r}: with lazy=False its momentum (beta_1) must stay below 1")
    if form.divisor >= 0 and not (form.epsilon > 0 and form.factors[form.divisor] > 0):
        raise BadSpec(f"optimizer {name!r}: lazy=False needs epsilon and beta_2 above 0; else Keras divides 0 by 0")
    return form


def known_dense_forms() -> tuple[str, ...]:
    """Names of the optimizers that have a dense form, sorted."""
    optimizers = {name: make(OptimizerSpec(name, ())) for name, make in FUSED.items()}
    return tuple(sorted(name for name, optimizer in optimizers.items() if optimizer.without_gradient() is not None))


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


def runs_keras(spec: OptimizerSpec) -> bool:
    """Whether a spec's optimizer, or one within it, is run by Keras, which is imported for it; nothing is yet."""
    name, text = spec.name, spec.keras_config
    while name != KERAS_BLOCK:
        try:
            within = json.loads(text)["optimizer"]
            name, text = within["name"], within["config"]
        except MALFORMED:
            return False
    return True


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
    if factory is FUSED.get(spec.name) and spec.keras_config:
        raise BadSpec(f"optimizer {spec.name!r} has hyperparameters, and no keras_config: that is for other optimizers")
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
