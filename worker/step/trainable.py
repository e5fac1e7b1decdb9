"""Which weights a step trains, and which it only carries along; what one micro-batch gives of them (`StepResult`)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter

import keras

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import ModelError
from elastable.embedding_store.shards.server_contract import Slices
from elastable.master.api import Divisor, GradientPart, Push, Tensor
from elastable.worker.keras.seeds import layers_of
from elastable.worker.rows.store_layer import StoreLayer

Weights = tuple[Sequence[keras.Variable], Sequence[keras.Variable]]
"""Variables that are trained, and all others."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one micro-batch; see `elastable.master.api.Push` for the shapes."""

    loss: float
    dense: tuple[Tensor, ...]
    slices: Mapping[str, Slices]
    states: tuple[Tensor, ...]
    metrics: tuple[Tensor, ...]
    divisor: Divisor | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    once: tuple[int, ...] = ()
    parts: tuple[GradientPart, ...] = ()
    not_finite: str = ""

    def pushed(self, push: Push, computed_on: int | None = None) -> Push:
        """The push of the micro-batch, with this result; `computed_on` as of `Push`."""
        return replace(
            push, dense=self.dense, slices=self.slices, states=self.states, metrics=self.metrics, divisor=self.divisor,
            losses=self.losses, once=self.once, parts=self.parts, not_finite=self.not_finite, computed_on=computed_on,
        )  # fmt: skip


def trained_and_others(
    model: keras.Model, planned: Weights | None = None
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """The weights of a model in model order: those its optimizer trains, or will train, and all others.

    The others include a dynamic loss scale (`loss_scale`).

    Args:
        model: A built model.
        planned: Those of its own `train_step` (`StepPlan.weights`).
    """
    if planned is not None:
        return list(planned[0]), list(planned[1])
    optimizer: keras.optimizers.Optimizer = getattr(model, "optimizer", None)
    weights = variables_of(model.weights)
    variables = optimizer._trainable_variables if getattr(optimizer, "built", False) else model.trainable_weights
    known = {id(variable) for variable in variables}
    others = [each for each in weights if id(each) not in known]
    return [each for each in weights if id(each) in known], [*others, *scale_variables(optimizer)]


_KEPT = "_elastable_loss_scale"


def scale_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variable of a dynamic loss scale as a list; empty if the optimizer has none."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return []
    if optimizer.built:
        return [optimizer.dynamic_scale]
    if not hasattr(optimizer, _KEPT):
        # A worker's optimizer makes no steps: it is not built, so it allocates no moments.
        scale = keras.Variable(optimizer.initial_scale, dtype="float32", trainable=False, name="dynamic_scale")
        object.__setattr__(optimizer, _KEPT, scale)
    return [getattr(optimizer, _KEPT)]


def read_trainable(model: keras.Model) -> bytes:
    """A byte, 0 or 1, for each layer of the model and then for each of its variables, in model order."""
    return bytes(map(attrgetter("trainable"), (*layers_of(model), *variables_of(model.weights))))


@contextmanager
def imposed(model: keras.Model, trainable: bytes) -> Iterator[None]:
    """Sets these flags on the model within the block (`put_trainable`); b"": changes nothing.

    Keras reads `trainable` when it traces its train function; until it does so again later changes have no effect.
    """
    before = read_trainable(model)
    if not trainable or trainable == before:
        yield
        return
    put_trainable(model, trainable)
    try:
        yield
    finally:
        put_trainable(model, before)


def put_trainable(model: keras.Model, trainable: bytes) -> None:
    """Sets the flags that `read_trainable` read from this model, or an equal one.

    Raises:
        ModelError: the flags belong to another model.
    """
    layers, weights = layers_of(model), variables_of(model.weights)
    if len(trainable) != len(layers) + len(weights):
        raise ModelError(
            f"model {model.name!r} has {len(layers)} layers and {len(weights)} weights, but got trainable flags "
            f"of {len(trainable)}: run the same model file everywhere"
        )
    # Past Keras' setters, which pass a layer's flag on to its sublayers.
    for layer, flag in zip(layers, trainable, strict=False):
        layer._trainable = bool(flag)
    for weight, flag in zip(weights, trainable[len(layers) :], strict=True):
        weight.trainable = bool(flag)


def is_trained(model: keras.Model, layer: StoreLayer) -> bool:
    """Whether the table of a store-backed layer is trained under the current flags.

    As for a Keras weight: setting a parent's flag sets `layer.trainable`; of the parents, only the model itself is
    checked.
    """
    return bool(model.trainable and layer.trainable)


def frozen_tables(model: keras.Model, layers: Sequence[StoreLayer]) -> tuple[str, ...]:
    """Sorted names of the tables of a model's layers that are not trained under the current flags.

    Raises:
        ModelError: layers that share a table have different flags.
    """
    trained: dict[str, StoreLayer] = {}
    for layer in layers:
        other = trained.setdefault(layer.table_name, layer)
        if is_trained(model, layer) != is_trained(model, other):
            both = " and ".join(f"{each.name!r} (trainable={each.trainable})" for each in (other, layer))
            raise ModelError(
                f"layers {both} share the table {layer.table_name!r}, which is either trained or frozen: set "
                "trainable alike on both, or use a separate table for one of them"
            )
    frozen = []
    for name, layer in trained.items():
        if not is_trained(model, layer):
            frozen.append(name)
    return tuple(sorted(frozen))


def is_constant(model: keras.Model, layer: StoreLayer) -> bool:
    """Whether a layer is a frozen one of another model, as a teacher's is: its rows are constants."""
    of_model = [each for each in layers_of(model) if hasattr(each, "table_spec")]
    shares = layer.table_is_explicit and any(each.table_name == layer.table_name for each in of_model)
    if shares or any(each is layer for each in of_model):
        return False
    if not layer.trainable:
        return True
    raise ModelError(
        f"embedding layer {layer.name!r}: the model does not know the layer, because a Lambda or a function calls it, "
        "so it would not be trained: make it an attribute of the layer that calls it, or set trainable=False on it if "
        "its rows are meant to be constants"
    )
