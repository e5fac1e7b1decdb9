"""Splits a traced loss into terms, and finds what each was divided by.

A version's gradient must equal that of one batch of all its records, so micro-batches are combined term by term: a mean
over records is weighted by records, a masked mean by the number of unmasked values, a sum by nothing. The graph of the
loss is followed back through sums and constant factors to terms with a known divisor. An unknown divisor is reported,
never guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from elastable.master.api import DivisorKind
from elastable.worker.keras.graphs import ancestors
from elastable.worker.losses.reductions import RecordedLoss

__all__ = ["LossTerm", "averaged", "loss_terms", "summed"]

_AVERAGED, _SUMMED = "elastable_averaged", "elastable_summed"

# What a value depends on: nothing of the batch, only its shape, or its contents.
_CONSTANT, _SHAPE, _BATCH = range(3)
_SHAPE_OPS = ("Shape", "ShapeN", "Size", "Rank")
_THROUGH = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Snapshot")
_ARITHMETIC = ("Mul", "RealDiv", "DivNoNan", "Div", "Pow", "MulNoNan", "Xdivy", "AddV2", "Sub")
_READS = ("ReadVariable", "ResourceGather", "EagerPyFunc", "PyFunc")
_UNKNOWN, _BARE_SUM = "unknown", "sum"


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One summand of a loss.

    Attributes:
        value: The term with its factors, a scalar.
        kind: What it was divided by; None: unknown.
        amount: With `DivisorKind.AMOUNT` the divisor, a float64 scalar; else None.
        of_batch: Whether it depends on the batch; a regularizer of weights does not.
        where: The operation where the walk ended, for messages.
    """

    value: tf.Tensor
    kind: DivisorKind | None
    amount: tf.Tensor | None
    of_batch: bool
    where: str


def averaged(value: tf.Tensor) -> tf.Tensor:
    """Marks a scalar of a loss as a mean over the records of the batch; changes no number.

    For terms of `add_loss` and `compute_loss`, and losses that return a scalar, whose operations do not show it. See
    docs/model-file.md.
    """
    return tf.identity(value, name=_AVERAGED)


def summed(value: tf.Tensor) -> tf.Tensor:
    """Marks a scalar of a loss as a sum over the records of the batch; changes no number. See `averaged`."""
    return tf.identity(value, name=_SUMMED)


def loss_terms(
    loss: tf.Tensor, recorded: Sequence[RecordedLoss], batch: Collection[tf.Tensor], rows: Collection[tf.Tensor]
) -> list[LossTerm]:
    """The terms of a loss that is traced into a graph.

    Args:
        loss: A scalar, or a value per record (reduction "none"), whose gradient is that of the sum.
        recorded: The reductions of Keras' losses in it.
        batch: Tensors of the graph that hold data of the batch.
        rows: Tensors that hold rows of tables.
    """
    walk = _Walk(recorded, batch, rows)
    found = [_Leaf(loss, (), _UNKNOWN, None)] if loss.shape.rank is None else walk.leaves(loss)
    terms = []
    for leaf in found:
        value = leaf.tensor if leaf.tensor.shape.rank == 0 else tf.reduce_sum(leaf.tensor)
        # A scalar added to a value per record would count once per record.
        mixed = loss.shape.rank != 0 and leaf.tensor.shape.rank != loss.shape.rank
        for factor in leaf.factors:
            value = value * tf.cast(factor, value.dtype)
        known = not mixed and isinstance(leaf.kind, DivisorKind)
        terms.append(
            LossTerm(
                tf.cast(value, loss.dtype),
                DivisorKind(leaf.kind) if known else None,
                leaf.amount if known else None,
                walk.depends(leaf.tensor) != _CONSTANT,
                f"{leaf.tensor.op.type} {leaf.tensor.op.name!r}",
            )
        )
    return terms


@dataclass(frozen=True, slots=True)
class _Leaf:
    tensor: tf.Tensor
    factors: tuple[tf.Tensor | float, ...]
    kind: DivisorKind | str
    amount: tf.Tensor | None


class _Walk:
    def __init__(
        self, recorded: Sequence[RecordedLoss], batch: Collection[tf.Tensor], rows: Collection[tf.Tensor]
    ) -> None:
        self._recorded = {loss.result.ref(): loss for loss in recorded}
        self._rows = {tensor.ref() for tensor in rows}
        self._batch = self._rows | {tensor.ref() for tensor in batch}
        self._known: dict[Hashable, int] = {}

    def leaves(self, tensor: tf.Tensor, factors: tuple[tf.Tensor | float, ...] = ()) -> list[_Leaf]:
        """The summands of a tensor."""
        if (loss := self._recorded.get(tensor.ref())) is not None:
            return [_Leaf(tensor, factors, loss.kind, loss.amount)]
        depends = self.depends(tensor)
        if depends == _CONSTANT:
            return [_Leaf(tensor, factors, DivisorKind.RECORDS, None)]
        operation = tensor.op
        name = operation.name.rsplit("/", 1)[-1]
        if operation.type == "Identity" and name.startswith((_AVERAGED, _SUMMED)):
            marked = DivisorKind.RECORDS if name.startswith(_AVERAGED) else DivisorKind.NOTHING
            return [_Leaf(tensor, factors, marked, None)]
        inside = self._inside(tensor, factors) if depends == _BATCH else None
        return [_Leaf(tensor, factors, _UNKNOWN, None)] if inside is None else inside

    def _inside(self, tensor: tf.Tensor, factors: tuple[tf.Tensor | float, ...]) -> list[_Leaf] | None:
        operation, inputs = tensor.op, list(tensor.op.inputs)
        kind = operation.type
        if kind in _THROUGH:
            source = inputs[0]
            return self.leaves(source, factors) if source.shape.rank == tensor.shape.rank else None
        if kind in ("AddV2", "Add", "AddN"):
            return [leaf for part in inputs for leaf in self.leaves(part, factors)]
        if kind == "Sub":
            return [*self.leaves(inputs[0], factors), *self.leaves(inputs[1], (*factors, -1.0))]
        if kind == "Neg":
            return self.leaves(inputs[0], (*factors, -1.0))
        if kind == "Mul":
            return self._product(inputs, factors)
        if kind in ("RealDiv", "DivNoNan"):
            return self._quotient(tensor, inputs[0], inputs[1], factors)
        if kind in ("Sum", "Mean"):
            return self._reduction(tensor, inputs[0], kind, factors)
        return None

    def _product(self, inputs: Sequence[tf.Tensor], factors: tuple[tf.Tensor | float, ...]) -> list[_Leaf] | None:
        for one, other in (inputs, inputs[::-1]):
            if self.depends(other) == _CONSTANT and other.shape.rank == 0:
                return self.leaves(one, (*factors, other))
        return None

    def _quotient(
        self, tensor: tf.Tensor, above: tf.Tensor, below: tf.Tensor, factors: tuple[tf.Tensor | float, ...]
    ) -> list[_Leaf] | None:
        depends = self.depends(below)
        if below.shape.rank != 0:
            return None
        if depends == _CONSTANT:
            return self.leaves(above, (*factors, 1.0 / below))
        if any(leaf.kind not in (_BARE_SUM, DivisorKind.NOTHING) for leaf in self.leaves(above)):
            return None
        if depends == _SHAPE:
            return [_Leaf(tensor, factors, DivisorKind.RECORDS, None)]
        # Weights or a mask from the data, summed by the user: the divisor must not depend on trained values.
        counts = [] if self._is_trained(below) else self.leaves(below)
        if len(counts) == 1 and counts[0].kind == DivisorKind.NOTHING and not counts[0].factors:
            return [_Leaf(tensor, factors, DivisorKind.AMOUNT, tf.cast(below, tf.float64))]
        return None

    def _reduction(
        self, tensor: tf.Tensor, source: tf.Tensor, kind: str, factors: tuple[tf.Tensor | float, ...]
    ) -> list[_Leaf] | None:
        if source.shape.rank == 0:
            return self.leaves(source, factors)
        if tensor.shape.rank != 0:
            return None
        if source.op.type == "Pack" and source.shape.rank == 1:
            share = (*factors, 1.0 / len(source.op.inputs)) if kind == "Mean" else factors
            return [leaf for part in source.op.inputs for leaf in self.leaves(part, share)]
        if source.shape.rank is None or source.shape[0] is not None:
            return None
        if kind == "Mean":
            return [_Leaf(tensor, factors, DivisorKind.RECORDS, None)]
        return [_Leaf(tensor, factors, _BARE_SUM if self._is_scaled_by_size(source) else DivisorKind.NOTHING, None)]

    def depends(self, tensor: tf.Tensor) -> int:
        """What part of the batch a tensor depends on."""
        waiting = [tensor]
        while waiting:
            last = waiting[-1]
            if last.ref() in self._known:
                waiting.pop()
                continue
            missing = [part for part in last.op.inputs if part.ref() not in self._known]
            if missing and last.ref() not in self._batch:
                waiting.extend(missing)
                continue
            waiting.pop()
            self._known[last.ref()] = self._own(last)
        return self._known[tensor.ref()]

    def _own(self, tensor: tf.Tensor) -> int:
        if tensor.ref() in self._batch:
            return _BATCH
        most = max((self._known[part.ref()] for part in tensor.op.inputs), default=_CONSTANT)
        return min(most, _SHAPE) if tensor.op.type in _SHAPE_OPS else most

    def _is_scaled_by_size(self, tensor: tf.Tensor) -> bool:
        """Whether the batch size is used in arithmetic, as in `sum(x / batch_size)`."""
        return any(
            operation.type in _ARITHMETIC and any(self.depends(part) == _SHAPE for part in operation.inputs)
            for operation in ancestors(tensor)
        )

    def _is_trained(self, tensor: tf.Tensor) -> bool:
        """Whether a value is computed from rows or variables, and so has a gradient."""
        return any(
            operation.type.startswith(_READS) or any(part.ref() in self._rows for part in operation.outputs)
            for operation in ancestors(tensor)
        )
