"""The row optimizer of a spec: fused ones by Keras' names, and those that are registered."""

from functools import lru_cache

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.optimizers.base import Factory, RowOptimizer
from elastable.embedding_store.optimizers.dense_replay.dense_form import dense_form
from elastable.embedding_store.optimizers.fused import FUSED

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
