"""What `compile()`'s optimizer becomes for tables, and what of it is refused by name."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict

import keras

from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadInput, ModelError, Unsupported
from elastable.embedding_store.optimizers.base import KERAS_BLOCK
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.optimizers.registry import follows_steps, row_optimizer
from elastable.master.commits.dense_part import Clipping
from elastable.master.model.keras_block import OF_TORCH, TABLE_VARIABLE, canonical_config
from elastable.master.model.wrapping_optimizers import with_averages

FUSED_CLASSES: Mapping[Callable[..., keras.Optimizer], str] = {
    getattr(keras.optimizers, kind.__name__): name
    for name, kind in FUSED.items()
    if hasattr(keras.optimizers, kind.__name__)
}
"""Exact classes of Keras that a fused optimizer computes, and its name."""

# What every Keras optimizer has; honoured elsewhere (clipping, schedules) or refused below.
_COMMON = {
    "name",
    "learning_rate",
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
}


def clipping_of(optimizer: keras.Optimizer) -> Clipping:
    """How the optimizer clips; values that are not positive clip nothing, as in Keras."""
    optimizer, limits = inner_optimizer(optimizer), []
    for limit in (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue):
        limits.append(float(limit) if limit and limit > 0 else None)
    return Clipping(*limits)


def sees_occurrences(optimizer: keras.Optimizer | None, of_model: keras.Optimizer | None) -> str:
    """What of a table's optimizer is no sum of the gradients of an id: "Adam", "clipnorm", "Adam with clipnorm"; or "".

    By it a table that is a Keras variable of TensorFlow comes out otherwise where an id is in a batch several times.

    Args:
        optimizer: That trains the table.
        of_model: Of `compile()`. One that adds up the gradients of several batches holds them dense.
    """
    if optimizer is None or (of_model is not None and accumulation_of(of_model)):
        return ""
    inner, clipping = inner_optimizer(optimizer), clipping_of(optimizer)
    clips = [name for name, bound in asdict(clipping).items() if bound is not None]
    return " with ".join([*([type(inner).__name__] if _squares_gradients(inner) else []), *clips])


def _squares_gradients(optimizer: keras.Optimizer) -> bool:
    """Whether it is not known to be linear in the gradient of an id."""
    name = FUSED_CLASSES.get(keras_class(optimizer))
    return name is None or any(slot.squares for slot in row_optimizer(OptimizerSpec(name, ())).slots)


_UNCALLED = ("apply_gradients", "scale_loss", "finalize_variable_values")  # by anybody but Keras' own training loop


def keras_class(optimizer: keras.Optimizer) -> type[keras.Optimizer]:
    """Its class; of PyTorch's own version of one of Keras' optimizers that one, whose steps it takes."""
    kind: type[keras.Optimizer] = type(optimizer)
    return getattr(keras.optimizers, kind.__name__) if OF_TORCH in kind.__module__ else kind


def learning_rate_of(optimizer: keras.Optimizer) -> float:
    """The learning rate now: the schedule's at `optimizer.iterations`, or what was last assigned."""
    return float(keras.ops.convert_to_tensor(optimizer.learning_rate))


def refuse_unsupported(optimizer: keras.Optimizer | None) -> None:
    """Raises where something of the optimizer cannot be honoured.

    Raises:
        ModelError: there is no optimizer.
        Unsupported: naming what was asked for, and what to do instead.
    """
    if optimizer is None:
        raise ModelError("the model has no optimizer: call model.compile(optimizer=..., loss=...)")
    kind = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = optimizer.inner_optimizer
        if accumulation_of(inner):
            raise Unsupported(
                f"LossScaleOptimizer (which mixed_float16 adds) of {type(inner).__name__}(gradient_accumulation_steps="
                f"{inner.gradient_accumulation_steps}): where a gradient overflows Keras' updates no longer end with a "
                "version; leave the argument out and say grads_to_wait"
            )
        refuse_unsupported(inner)
        return
    multi = getattr(keras.optimizers, "MultiOptimizer", None)
    if multi is not None and isinstance(optimizer, multi):
        raise Unsupported(
            "MultiOptimizer is not supported: compile the model with the optimizer of its dense variables, and give "
            "tables their own, et.Embedding(..., optimizer=keras.optimizers.Adagrad(0.1))"
        )
    if optimizer.use_ema and accumulation_of(optimizer):
        raise Unsupported(
            f"{kind}(use_ema=True, gradient_accumulation_steps={optimizer.gradient_accumulation_steps}): Keras moves "
            "the averages with every batch, and here they move with every update; leave the latter out and say "
            "grads_to_wait"
        )
    _refuse_callable_rate(optimizer, kind)
    _refuse_replaced(optimizer, kind)


def _refuse_replaced(optimizer: keras.Optimizer, kind: str) -> None:
    """Raises where a program replaces what only Keras' own training loop would call, or one object's methods."""
    replaced = [name for name in vars(optimizer) if callable(getattr(type(optimizer), name, None))]
    replaced += [name for name in _UNCALLED if not getattr(type(optimizer), name).__module__.startswith("keras.")]
    if replaced:
        raise Unsupported(
            f"{kind}.{replaced[0]} is the program's own and would not be called, as rows and dense variables are "
            "updated apart: override `apply` or `update_step` in a subclass, or do it in a callback"
        )


def optimizer_of(model: keras.Model) -> keras.Optimizer:
    """The optimizer of `compile()`. Raises as `refuse_unsupported`."""
    optimizer = getattr(model, "optimizer", None)
    refuse_unsupported(optimizer)
    return optimizer


def inner_optimizer(optimizer: keras.Optimizer) -> keras.Optimizer:
    """The optimizer that updates variables: that within a `LossScaleOptimizer`, or the one itself."""
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if scaling else optimizer


def refuse_of_table(optimizer: keras.Optimizer) -> None:
    """Raises where an optimizer of a table's own says what is the model's optimizer's to say."""
    kind = type(optimizer).__name__
    _refuse_replaced(optimizer, kind)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise Unsupported("LossScaleOptimizer: the loss is one for all tables and variables; give it to compile()")
    if accumulation_of(optimizer):
        raise Unsupported(
            f"{kind}(gradient_accumulation_steps={optimizer.gradient_accumulation_steps}): a step of a job is one of "
            "all its tables and variables; give it to the optimizer of compile()"
        )
    if getattr(optimizer, "loss_scale_factor", None) is not None:
        raise Unsupported(
            f"{kind}(loss_scale_factor={optimizer.loss_scale_factor}): the loss is one for all tables and variables; "
            "give it to the optimizer of compile()"
        )


def refuse_scaled_loss(optimizer: keras.Optimizer | None, table: OptimizerSpec) -> None:
    """Raises where rows would follow a step that a changing loss scale makes none.

    Args:
        optimizer: Of `compile()`.
        table: The table, which may have its own.
    """
    if follows_steps(table) and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise Unsupported(
            "LossScaleOptimizer (which mixed_float16 adds) with lazy=False: a step that overflows is no step, and "
            "rows that no batch touches would follow it; leave one of them out"
        )


def accumulation_of(optimizer: keras.Optimizer) -> int:
    """Batches whose gradients Keras adds up for one update; 0: one batch is one update."""
    return int(getattr(inner_optimizer(optimizer), "gradient_accumulation_steps", None) or 0)


def accumulated_by(
    optimizer: keras.Optimizer, micro_batches: int, grads_to_wait: int | None, average: str
) -> tuple[int, str]:
    """The job's `grads_to_wait` and `average` under the optimizer of `compile()`.

    With Keras' `gradient_accumulation_steps=k` a version is k micro-batches that weigh the same.

    Args:
        micro_batches: In a pass over the records.
        grads_to_wait: As the user said; None: not at all.
        average: Likewise; "mean" is the default.

    Raises:
        BadInput: the two contradict each other, or an update would have batches of two passes.
    """
    steps = accumulation_of(optimizer)
    if not steps:
        return grads_to_wait or 1, average
    name = f"{type(optimizer).__name__}(gradient_accumulation_steps={steps})"
    if grads_to_wait not in (None, steps) or average not in ("mean", "batches"):
        raise BadInput(
            f"{name} is an update every {steps} batches that weigh the same, and the job says "
            f"grads_to_wait={grads_to_wait}, average={average!r}: say it in one of the two places"
        )
    if micro_batches % steps:
        raise BadInput(
            f"{name}: a pass over the records has {micro_batches} batches, which is not a multiple of it; Keras would "
            "begin an update with the last batches of one epoch and end it in the next. Choose a batch size with which "
            "it is one, or leave the argument out and say grads_to_wait, whose last update of a pass may have fewer"
        )
    return steps, "batches"


def _refuse_callable_rate(optimizer: keras.Optimizer, kind: str) -> None:
    rate = getattr(optimizer, "_learning_rate", None)
    schedules = keras.optimizers.schedules.LearningRateSchedule
    if callable(rate) and not isinstance(rate, schedules):
        raise Unsupported(
            f"{kind}(learning_rate={rate!r}): a function as learning rate is not supported, because Keras calls it "
            "once and keeps the value; use a LearningRateSchedule, or set the rate in a callback"
        )


def table_optimizer(
    optimizer: keras.Optimizer | None, lazy: bool = True, variable: str = TABLE_VARIABLE, key: str | int | None = None
) -> OptimizerSpec:
    """The optimizer of a model's tables.

    One of Keras' own, by its exact class, becomes the fused optimizer of that name. Any other is run by Keras itself on
    the block of rows in question, where it treats rows separately. `weight_decay` is lazy: it decays the rows that have
    a gradient, unless `lazy` is False: then every row follows every step, as in Keras. Clipping is left out: it is done
    jointly, before. With `use_ema` the rows that a step touches have a moving average each.

    Args:
        lazy: Whether rows without a gradient stay as they are.
        variable, key: Name and key of the Keras variable that the table replaces: `exclude_from_weight_decay` says
            by them which variables do not decay.

    Raises:
        ModelError: there is no optimizer.
        Unsupported: naming what of it cannot be honoured.
    """
    refuse_unsupported(optimizer)
    inner = inner_optimizer(optimizer)
    if inner.use_ema and not lazy:
        raise Unsupported(
            f"{type(inner).__name__}(use_ema=True) with lazy=False: the average of a row moves when the row is "
            "touched, and lazy=False promises that every row follows every step; leave one of them out, or say "
            "lazy=True on the layer"
        )
    spec = _stepped_by(inner, lazy, _leaves_undecayed(inner, variable, key))
    refuse_scaled_loss(optimizer, spec)  # and one that cannot be other than lazy
    return with_averages(spec, inner.ema_momentum, inner.ema_overwrite_frequency) if inner.use_ema else spec


def _stepped_by(optimizer: keras.Optimizer, lazy: bool, undecayed: bool) -> OptimizerSpec:
    """What the steps of a Keras optimizer are for tables, without averages."""
    rate = learning_rate_of(optimizer)
    decay = None if undecayed or optimizer.weight_decay is None else float(optimizer.weight_decay)
    config = optimizer.get_config()
    name = FUSED_CLASSES.get(keras_class(optimizer), "")
    hyperparameters = FUSED[name].defaults.keys() - _COMMON if name else set()
    if name and set(config) <= _COMMON | hyperparameters:
        values = {key: float(config[key]) for key in hyperparameters}
        return OptimizerSpec.of(name, lazy=lazy, learning_rate=rate, weight_decay=decay or 0.0, **values)
    # JSON with sorted keys and without the name that Keras counts up, so that equal optimizers give equal specs.
    text = json.dumps(canonical_config(optimizer, rate, decay, undecayed), sort_keys=True)
    spec = OptimizerSpec(KERAS_BLOCK, (("learning_rate", rate),), text, lazy)
    row_optimizer(spec)  # refuses now, not at the first commit
    return spec


def _leaves_undecayed(optimizer: keras.Optimizer, variable: str, key: str | int | None) -> bool:
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    named = pattern is not None and re.search(pattern, variable) is not None
    return named or key in getattr(optimizer, "_exclude_from_weight_decay", ())
