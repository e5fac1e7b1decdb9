"""The current scope decides where an embedding call reads its rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar

import tensorflow as tf
from tensorflow.python.eager import record

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import ModelError, Unsupported

if TYPE_CHECKING:
    from elastable.worker.rows.store_backed import StoreBacked

__all__ = [
    "EmbeddingCall",
    "PlanScope",
    "RowScope",
    "StepScope",
    "current_scope",
    "entered",
    "refuse_inner_call",
]

#: Marks the zeros a plan returns as rows, so that ids computed from them are recognised as not plannable.
PLANNED_ROWS = "elastable_planned_rows"
#: Marks all rows of a table, read as a weight: they are the same in every micro-batch, as a variable is.
ALL_ROWS = "elastable_all_rows"


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """One call of one layer in a step.

    Attributes:
        layer: The layer called.
        ids: int64 `[n]` tensor of the trace it was recorded in.
    """

    layer: StoreBacked
    ids: tf.Tensor


class RowScope:
    """Provides rows to the embedding calls of a whole step: the model, its loss and its metrics.

    Scopes are per thread, like tracing. Without one, a layer reads its source or initial values.
    """

    def leaves_out(self, layer: StoreBacked) -> bool:
        """Whether a layer reads its rows as outside of a step."""
        return False

    def rows(self, layer: StoreBacked, ids: tf.Tensor) -> tf.Tensor:
        """float32 `[n, dim]`: the rows of a call's int64 `[n]` ids."""
        raise NotImplementedError


class PlanScope(RowScope):
    """Records the ids of every embedding call of a step that is traced, and returns zeros as rows."""

    def __init__(self) -> None:
        self.calls: list[EmbeddingCall] = []

    def rows(self, layer: StoreBacked, ids: tf.Tensor) -> tf.Tensor:
        """Records `ids` and returns zeros `[n, dim]`."""
        self.calls.append(EmbeddingCall(layer, ids))
        zeros = tf.zeros([tf.shape(ids)[0], layer.output_dim])
        return tf.identity(zeros, name=PLANNED_ROWS)


@dataclass(slots=True)
class StepScope(RowScope):
    """Gathers the rows of planned calls from the BETs, and looks up the others within the graph.

    Attributes:
        layers: The layer of every planned step's call, in call order.
        inverses: For every call an int32 `[n]` tensor of positions in its table's BET; None for a call that could not
            be planned.
        bets: Table name -> float32 `[unique ids, dim]`, watched by the tape.
        lookup: (table, ids) -> rows, for calls that could not be planned.
        tape: Watches the BETs of unplanned calls before they are used; a later watch would give no gradient.
        unplanned: (table, unique ids, BET) of every unplanned call.
        losses_read: Whether the model's losses were collected, as Keras' own `compute_loss` does; without that its
            regularizers have no effect.
    """

    layers: Sequence[StoreBacked]
    inverses: Sequence[tf.Tensor | None]
    bets: dict[str, tf.Tensor]
    lookup: Callable[[str, Int64], Float32] | None = None
    tape: tf.GradientTape = None
    unplanned: list[tuple[str, tf.Tensor, tf.Tensor]] = field(default_factory=list)
    losses_read: bool = False
    _next: int = 0

    def leaves_out(self, layer: StoreBacked) -> bool:
        """A frozen one of another model, which was not planned."""
        return not layer.trainable and not any(each is layer for each in self.layers)

    def rows(self, layer: StoreBacked, ids: tf.Tensor) -> tf.Tensor:
        """float32 `[n, dim]`: the rows of this call's ids."""
        call = self._next
        self._next += 1
        if call >= len(self.layers) or self.layers[call] is not layer:
            seen = "no call" if call >= len(self.layers) else f"layer {self.layers[call].name!r}"
            raise ModelError(
                f"embedding layer {layer.name!r}: call {call} of the step was planned as {seen}; "
                "a step must make the same embedding calls every time it is traced"
            )
        if self.tape is not None and layer.trainable and not record.could_possibly_record():
            raise Unsupported(
                f"embedding layer {layer.name!r} is called where no gradient is recorded, as in a keras.RematScope, "
                "tf.recompute_grad or tape.stop_recording(), so its table would not be trained; call it outside and "
                "pass its output in, or set trainable=False on the layer"
            )
        if self.inverses[call] is None:
            return self._look_up_in_graph(layer, ids)
        return tf.gather(self.watched(layer, self.bets[layer.table_name], None), self.inverses[call])

    def watched(self, layer: StoreBacked, rows: tf.Tensor, in_graph: int | None) -> tf.Tensor:
        """The rows that a call gathers from; `in_graph` is the number of a call that could not be planned."""
        return rows

    def _look_up_in_graph(self, layer: StoreBacked, ids: tf.Tensor) -> tf.Tensor:
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


def refuse_inner_call(layer: StoreBacked) -> NoReturn:
    """Raises `Unsupported` for a layer that is called inside an inner graph of the step."""
    raise Unsupported(
        f"embedding layer {layer.name!r} is called inside of a loop, a condition or a compiled function; call it "
        "outside and pass its output in"
    )


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
