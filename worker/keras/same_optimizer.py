"""What a model's optimizers were as training began: Keras trains on with that, whatever is assigned since.

Keras traces its step once after `compile`, and the trace holds hyperparameters as numbers; an eager step reads them
again. Here a table's spec holds them. So a change is refused, but for that of a learning rate, which is a variable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import keras

from elastable.embedding_store.errors import Unsupported
from elastable.worker.keras.seeds import layers_of

__all__ = ["Hyperparameters", "optimizers_of", "require_same_optimizer"]

_BEGAN = "_elastable_training_began"
_COMPILE_AGAIN = "call model.compile(...) again, with this optimizer or a new one"


def optimizers_of(model: keras.Model, planned: Iterable[keras.Optimizer] = ()) -> list[keras.Optimizer]:
    """The optimizers that train a model, each once: of `compile()`, of its tables, and of its own `train_step`."""
    own = (getattr(layer, "optimizer", None) for layer in layers_of(model) if hasattr(layer, "table_spec"))
    found = {id(each): each for each in (model.optimizer, *own, *planned) if each is not None}
    return list(found.values())


class Hyperparameters:
    """What the steps of an optimizer are made of now, but for its learning rate."""

    def __init__(self, optimizer: keras.Optimizer) -> None:
        self.optimizer = optimizer
        self._values = _values(optimizer)

    def require(self, of: str, remedy: str = _COMPILE_AGAIN) -> None:
        """Raises `Unsupported` where they are others now.

        Args:
            of: What is trained, for the message.
            remedy: What to do instead.
        """
        now, before = _values(self.optimizer), self._values
        if now == before:
            return
        name = next(name for name in {**before, **now} if now.get(name) != before.get(name))
        raise Unsupported(
            f"{of}: {name} of the optimizer {self.optimizer.name!r} was changed from {before.get(name)} to "
            f"{now.get(name)} after training began: {remedy}"
        )


def _values(optimizer: keras.Optimizer) -> dict[str, str]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner._learning_rate
    if callable(rate) and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return {"learning_rate": repr(rate)}  # refused as soon as its steps are needed
    config: dict[str, object] = inner.get_config()
    changing: dict[str, object] = {"name": None, "learning_rate": None}
    if callable(rate):
        changing |= {"learning_rate": rate, "the schedule": config["learning_rate"]}
    excluded = {
        "exclude_from_weight_decay(var_names)": getattr(inner, "_exclude_from_weight_decay_pattern", None),
        "exclude_from_weight_decay(var_list)": getattr(inner, "_exclude_from_weight_decay", None),
    }
    scaling = {name: getattr(optimizer, name) for name in ("dynamic_growth_steps",) if optimizer is not inner}
    return {name: repr(value) for name, value in {**config, **changing, **excluded, **scaling}.items()}


@dataclass(frozen=True, slots=True)
class _Began:
    """How training began since a model was compiled.

    Attributes:
        compiled: What `compile()` makes anew, also for an optimizer that it is given again.
        optimizer: Of `compile()`.
        kept: id -> what it was, of all that train the model.
    """

    compiled: object
    optimizer: keras.Optimizer
    kept: dict[int, Hyperparameters]


def require_same_optimizer(model: keras.Model, planned: Iterable[keras.Optimizer] = ()) -> None:
    """Called as training begins, with the optimizers that it is for.

    Args:
        model: A compiled model.
        planned: As of `optimizers_of`.

    Raises:
        Unsupported: another optimizer has trained the model since it was compiled, or the same one with other
            hyperparameters: plain Keras trains on with those.
    """
    compiled = getattr(model, "_compile_config", None)
    began: _Began | None = getattr(model, _BEGAN, None)
    optimizers = optimizers_of(model, planned)
    if began is None or compiled is None or began.compiled is not compiled or not began.optimizer.built:
        began = _Began(compiled, model.optimizer, {id(each): Hyperparameters(each) for each in optimizers})
        object.__setattr__(model, _BEGAN, began)  # past Keras' tracking
        return
    for each in optimizers:
        kept = began.kept.get(id(each))
        if kept is None or began.optimizer is not model.optimizer:
            raise Unsupported(
                f"model {model.name!r}: its optimizer was replaced by {each.name!r} after it had trained, and Keras "
                "would go on with the old one; write model.compile(optimizer=..., loss=...) with the new one"
            )
        kept.require(f"model {model.name!r}")
