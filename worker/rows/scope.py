"""The current scope decides where an embedding call reads its rows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.embedding_store.shards.server_contract import Slices
from elastable.master.backend.lazy import LazyModule, tf
from elastable.worker.keras.structures import Gradient
from elastable.worker.rows.store_layer import StoreLayer

#: Marks the zeros a plan returns as rows, so that ids computed from them are recognised as not plannable.
PLANNED_ROWS = "elastable_planned_rows"
#: Marks all rows of a table, read as a weight: they are the same in every micro-batch, as a variable is.
ALL_ROWS = "elastable_all_rows"
#: Of TensorFlow; tells whether a tape records.
record = LazyModule("tensorflow.python.eager.record")
_FORMATS = {
    "keras/src/export/onnx": "onnx",
    "keras/src/export/openvino": "openvino",
    "keras/src/export/litert": "litert",
    "keras/src/export/": "tf_saved_model",
    "tensorflow/lite/": "litert",
    "tensorflow/python/saved_model/": "tf_saved_model",
}


class RowScope:
    """Provides rows to the embedding calls of a whole step: the model, its loss and its metrics.

    Scopes are per thread, like tracing. Without one, a layer reads its source or initial values.

    Attributes:
        losses_read: Whether the model's losses were collected, as Keras' own `compute_loss` does; without that its
            regularizers have no effect.
    """

    losses_read: bool = False

    def leaves_out(self, layer: StoreLayer) -> bool:
        """Whether a layer reads its rows as outside of a step."""
        return False

    def rows(self, layer: StoreLayer, ids: tf.Tensor) -> tf.Tensor:
        """float32 `[n, dim]`: the rows of a call's int64 `[n]` ids."""
        raise NotImplementedError


class PlanScope(RowScope):
    """Records the ids of every embedding call of a step that is traced, and returns zeros as rows.

    Attributes:
        calls: (layer, its int64 `[n]` ids, symbolic) of every call.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[StoreLayer, tf.Tensor]] = []

    def rows(self, layer: StoreLayer, ids: tf.Tensor) -> tf.Tensor:
        """Records `ids` and returns zeros `[n, dim]`."""
        self.calls.append((layer, ids))
        return tf.identity(tf.zeros([tf.shape(ids)[0], layer.output_dim]), name=PLANNED_ROWS)


@dataclass(slots=True)
class PlannedCalls(RowScope):
    """A scope of a step whose calls were planned.

    Attributes:
        layers: The layer of every call that was planned, in call order.
    """

    layers: Sequence[StoreLayer]
    losses_read: bool = field(default=False, init=False)
    _next: int = field(default=0, init=False)

    def leaves_out(self, layer: StoreLayer) -> bool:
        """A frozen one of another model, which was not planned."""
        return not layer.trainable and not any(each is layer for each in self.layers)

    def numbered(self, layer: StoreLayer) -> int:
        """The number of the call that is made now, which must be the one that was planned."""
        call = self._next
        self._next += 1
        if call >= len(self.layers) or self.layers[call] is not layer:
            seen = "no call" if call >= len(self.layers) else f"layer {self.layers[call].name!r}"
            raise ModelError(
                f"embedding layer {layer.name!r}: call {call} of the step was planned as {seen}; "
                "a step must make the same embedding calls every time it is run or traced"
            )
        return call


@dataclass(slots=True)
class StepScope(PlannedCalls):
    """Gathers the rows of planned calls from the BETs, and looks up the others within the graph.

    Attributes:
        inverses: For every call an int32 `[n]` tensor of positions in its table's BET; None for a call that could not
            be planned.
        bets: Table name -> float32 `[unique ids, dim]`, watched by the tape.
        lookup: (table, ids) -> rows, for calls that could not be planned.
        tape: Watches the BETs of unplanned calls before they are used; a later watch would give no gradient.
        unplanned: (table, unique ids, BET) of every unplanned call.
    """

    inverses: Sequence[tf.Tensor | None]
    bets: dict[str, tf.Tensor]
    lookup: Callable[[str, Int64], Float32] | None = None
    tape: tf.GradientTape = None
    unplanned: list[tuple[str, tf.Tensor, tf.Tensor]] = field(default_factory=list)

    def rows(self, layer: StoreLayer, ids: tf.Tensor) -> tf.Tensor:
        """float32 `[n, dim]`: the rows of this call's ids."""
        call = self.numbered(layer)
        if self.tape is not None and layer.trainable and not record.could_possibly_record():
            raise Unsupported(
                f"embedding layer {layer.name!r} is called where no gradient is recorded, as in a keras.RematScope, "
                "tf.recompute_grad or tape.stop_recording(), so its table would not be trained; call it outside and "
                "pass its output in, or set trainable=False on the layer"
            )
        if self.inverses[call] is None:
            return self._look_up_in_graph(layer, ids)
        return tf.gather(self.watched(layer, self.bets[layer.table_name], None), self.inverses[call])

    def watched(self, layer: StoreLayer, rows: tf.Tensor, in_graph: int | None) -> tf.Tensor:
        """The rows that a call gathers from; `in_graph` is the number of a call that could not be planned."""
        return rows

    def _look_up_in_graph(self, layer: StoreLayer, ids: tf.Tensor) -> tf.Tensor:
        if self.lookup is None:
            raise ModelError(f"embedding layer {layer.name!r}: its ids cannot be planned and no lookup is available")
        lookup = self.lookup
        unique, inverse = tf.unique(ids)
        rows = tf.numpy_function(lambda asked: lookup(layer.table_name, asked), [unique], tf.float32)
        bet = tf.ensure_shape(rows, [None, layer.output_dim])
        if self.tape is not None:
            self.tape.watch(bet)
        self.unplanned.append((layer.table_name, unique, bet))
        return tf.gather(self.watched(layer, bet, len(self.unplanned) - 1), inverse)


Scope = TypeVar("Scope", bound=RowScope)
_current = threading.local()


def current_scope() -> RowScope | None:
    """The current scope of this thread, if there is one."""
    scope: RowScope | None = getattr(_current, "scope", None)
    return scope


@contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """Makes `scope` the thread's current scope within the block."""
    before = current_scope()
    _current.scope = scope
    try:
        yield scope
    finally:
        _current.scope = before


# Lookups under the user's own tapes


_anchor: list[tf.Variable] = []


@dataclass(frozen=True, slots=True)
class TapeLookup:
    """One call of a layer.

    Attributes:
        unique: int64 `[u]`: its unique ids.
        rows: float32 `[u, dim]` tensor that the call gathered from, watched by all open tapes.
    """

    layer: StoreLayer
    unique: Int64
    rows: tf.Tensor


class TapeScope(RowScope):
    """Reads the current rows at each call, and records the lookups."""

    def __init__(self) -> None:
        self.lookups: list[TapeLookup] = []

    def rows(self, layer: StoreLayer, ids: tf.Tensor) -> tf.Tensor:
        """float32 `[n, dim]`: the rows of this call's ids.

        Raises:
            Unsupported: within a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise Unsupported(
                f"embedding layer {layer.name!r} is called by a tf.function within et.step: let the loop run eagerly, "
                "without @tf.function and with compile(run_eagerly=True)"
            )
        unique, inverse = tf.unique(ids)
        looked_up = TapeLookup(layer, unique.numpy(), seen_by_tapes(layer.read_rows(unique.numpy())))
        self.lookups.append(looked_up)
        return tf.gather(looked_up.rows, inverse)


def seen_by_tapes(rows: tf.Tensor) -> tf.Tensor:
    """The same rows, watched by every open tape.

    Tapes record everything computed from a trainable variable, so zero times a variable is added.
    """
    if not _anchor:
        with tf.init_scope():
            _anchor.append(tf.Variable(0.0, trainable=True, name="elastable_anchor"))
    return rows + _anchor[0] * 0.0


def slices_of(lookups: Sequence[TapeLookup], gradients: Sequence[Gradient]) -> dict[str, Slices]:
    """Table name -> the gradients of its lookups; a gradient of None is skipped."""
    found: dict[str, list[tuple[Int64, Float32]]] = {}
    for lookup, gradient in zip(lookups, gradients, strict=True):
        if gradient is None:
            continue
        part = (lookup.unique, np.asarray(gradient))
        if not isinstance(gradient, np.ndarray) and isinstance(gradient, tf.IndexedSlices):
            part = (lookup.unique[np.asarray(gradient.indices)], np.asarray(gradient.values))
        found.setdefault(lookup.layer.table_name, []).append(part)
    return {
        table: Slices(np.concatenate([ids for ids, _ in parts]), np.concatenate([values for _, values in parts]))
        for table, parts in found.items()
    }


def export_format() -> str | None:
    """The format a model is being exported to, from the call stack; None: no export is running."""
    frame, found = sys._getframe(), None
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        for part, kind in _FORMATS.items():
            if part in name and (found is None or kind != "tf_saved_model"):
                found = kind
                break
        frame = frame.f_back  # type: ignore[assignment]
    return found
