"""Splits a traced loss into terms, and finds what each was divided by.

A version's gradient must equal that of one batch of all its records, so micro-batches are combined term by term: a mean
over records is weighted by records, a mean over chosen or unmasked values by their number, a sum by nothing. The graph
of the loss is followed back through sums and constant factors to terms with a known divisor, whose values come from one
record each (`elastable.worker.losses.origins`). What is unknown is reported, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from elastable.master.api import DivisorKind
from elastable.worker.keras.graphs import ancestors
from elastable.worker.losses.origin_rules import Kind, reduced_axes
from elastable.worker.losses.origins import Origins, place_of
from elastable.worker.losses.recording import RecordedLoss

__all__ = ["LossTerm", "averaged", "loss_terms", "settled_losses", "summed"]

_AVERAGED, _SUMMED = "elastable_averaged", "elastable_summed"
_THROUGH = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Snapshot", "Transpose", "StridedSlice", "GatherV2")
_READS = ("ReadVariable", "ResourceGather", "EagerPyFunc", "PyFunc")


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One summand of a loss.

    Attributes:
        value: The term with its factors, a scalar.
        kind: What it was divided by; None: unknown.
        amount: With `DivisorKind.AMOUNT` the divisor, a float64 scalar; else None.
        of_batch: Whether it depends on the batch; a regularizer of weights does not.
        where: With an unknown divisor, the operation that hides it, for messages.
        mixes: Whether that operation mixes the records of a batch, or is not known to keep them apart.
        may_be_empty: Whether the term is a mean that may be one of no values, and is taken for zero then.
    """

    value: tf.Tensor
    kind: DivisorKind | None
    amount: tf.Tensor | None
    of_batch: bool
    where: str = ""
    mixes: bool = False
    may_be_empty: bool = False


def averaged(value: tf.Tensor) -> tf.Tensor:
    """Marks a scalar of a loss as a mean over the records of the batch; changes no number.

    For terms of `add_loss` and `compute_loss`, and losses that return a scalar, whose operations do not show it. See
    docs/model-file.md.
    """
    return tf.identity(value, name=_AVERAGED)


def summed(value: tf.Tensor) -> tf.Tensor:
    """Marks a scalar of a loss as a sum over the records of the batch; changes no number. See `averaged`."""
    return tf.identity(value, name=_SUMMED)


def settled_losses(recorded: Sequence[RecordedLoss], origins: Origins) -> list[RecordedLoss]:
    """The reductions of Keras' losses, with what each divided by now that the origins of its values are known."""
    return [_settled(loss, origins) for loss in recorded]


def _settled(loss: RecordedLoss, origins: Origins) -> RecordedLoss:
    cause = origins.first_mixed(loss.values)
    if cause is not None:
        return replace(loss, kind=None, amount=None, cause=cause)
    values = loss.values[0]
    if loss.kind is DivisorKind.RECORDS and not origins.counts_records(values):
        return replace(loss, kind=DivisorKind.AMOUNT, amount=tf.cast(tf.size(values), tf.float64))
    return loss


def loss_terms(loss: tf.Tensor, settled: Sequence[RecordedLoss], origins: Origins) -> list[LossTerm]:
    """The terms of a loss that is traced into a graph.

    Args:
        loss: A scalar, or a value per record (reduction "none"), whose gradient is that of the sum.
        settled: The reductions of Keras' losses in it, settled.
        origins: Of the step's tensors.
    """
    walk = _Walk(settled, origins)
    found = [_Leaf(loss, (), None)] if loss.shape.rank is None else walk.leaves(loss)
    return [_term(leaf, loss, origins) for leaf in found]


def _term(leaf: _Leaf, loss: tf.Tensor, origins: Origins) -> LossTerm:
    value = leaf.tensor if leaf.tensor.shape.rank == 0 else tf.reduce_sum(leaf.tensor)
    # A scalar added to a value per record would count once per record.
    known = leaf.kind is not None and (loss.shape.rank == 0 or leaf.tensor.shape.rank == loss.shape.rank)
    if leaf.amount is not None and leaf.may_be_empty:
        value = tf.where(leaf.amount > 0, value, tf.zeros_like(value))
    for factor in leaf.factors:
        value = value * tf.cast(factor, value.dtype)
    origin = origins.of(leaf.tensor)
    cause = leaf.cause or origin.cause or leaf.tensor.op
    return LossTerm(
        tf.cast(value, loss.dtype),
        leaf.kind if known else None,
        leaf.amount if known else None,
        origin.kind is not Kind.CONSTANT,
        "" if known else place_of(cause),
        not known and (leaf.cause is not None or origin.kind is Kind.MIXED),
        leaf.may_be_empty,
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    tensor: tf.Tensor
    factors: tuple[tf.Tensor | float, ...]
    kind: DivisorKind | None
    amount: tf.Tensor | None = None
    cause: tf.Operation | None = None
    may_be_empty: bool = False


class _Walk:
    def __init__(self, settled: Sequence[RecordedLoss], origins: Origins) -> None:
        self._recorded = {loss.result.ref(): loss for loss in settled}
        self._origins = origins

    def leaves(self, tensor: tf.Tensor, factors: tuple[tf.Tensor | float, ...] = ()) -> list[_Leaf]:
        """The summands of a tensor."""
        if (loss := self._recorded.get(tensor.ref())) is not None:
            return [_Leaf(tensor, factors, loss.kind, loss.amount, loss.cause)]
        operation = tensor.op
        if self._kind(tensor) is Kind.CONSTANT:
            return [_Leaf(tensor, factors, DivisorKind.RECORDS)]
        name = operation.name.rsplit("/", 1)[-1]
        if operation.type == "Identity" and name.startswith((_AVERAGED, _SUMMED)):
            marked = DivisorKind.RECORDS if name.startswith(_AVERAGED) else DivisorKind.NOTHING
            return [_Leaf(tensor, factors, marked)]
        return self._inside(tensor, factors) or [_Leaf(tensor, factors, None)]

    def _kind(self, tensor: tf.Tensor) -> Kind:
        return self._origins.of(tensor).kind

    def _inside(self, tensor: tf.Tensor, factors: tuple[tf.Tensor | float, ...]) -> list[_Leaf] | None:
        operation, inputs = tensor.op, list(tensor.op.inputs)
        kind = operation.type
        if kind in _THROUGH:
            same = inputs[0].shape.rank == tensor.shape.rank == 0
            return self.leaves(inputs[0], factors) if same else self._linear(tensor, inputs[0], factors)
        if kind in ("AddV2", "Add", "AddN"):
            return [leaf for part in inputs for leaf in self.leaves(part, factors)]
        if kind == "Sub":
            return [*self.leaves(inputs[0], factors), *self.leaves(inputs[1], (*factors, -1.0))]
        if kind == "Neg":
            return self.leaves(inputs[0], (*factors, -1.0))
        if kind == "Mul":
            return self._multiple(tensor, inputs, factors)
        if kind in ("RealDiv", "DivNoNan"):
            return self._quotient(tensor, inputs[0], inputs[1], factors)
        if kind in ("Sum", "Mean"):
            return self._reduction(tensor, inputs[0], kind, factors)
        sources = [self._kind(part) for part in inputs]
        if self._kind(tensor) is Kind.TOTAL and all(each in (Kind.CONSTANT, Kind.APART) for each in sources):
            return [_Leaf(tensor, factors, DivisorKind.NOTHING)]
        return None

    def _linear(
        self, tensor: tf.Tensor, source: tf.Tensor, factors: tuple[tf.Tensor | float, ...]
    ) -> list[_Leaf] | None:
        """A tensor that takes every element of `source` times a constant: divided as all of its terms are."""
        if self._kind(tensor) is not Kind.TOTAL:
            return None
        inner = self.leaves(source)
        first = inner[0]
        alike = all((leaf.kind, leaf.amount is first.amount) == (first.kind, True) for leaf in inner)
        if first.kind is None or not alike:
            return None
        return [_Leaf(tensor, factors, first.kind, first.amount, may_be_empty=first.may_be_empty)]

    def _multiple(
        self, tensor: tf.Tensor, inputs: Sequence[tf.Tensor], factors: tuple[tf.Tensor | float, ...]
    ) -> list[_Leaf] | None:
        for one, other in (inputs, inputs[::-1]):
            if self._kind(other) is Kind.CONSTANT:
                scalar = other.shape.rank == 0
                return self.leaves(one, (*factors, other)) if scalar else self._linear(tensor, one, factors)
        return None

    def _quotient(
        self, tensor: tf.Tensor, above: tf.Tensor, below: tf.Tensor, factors: tuple[tf.Tensor | float, ...]
    ) -> list[_Leaf] | None:
        divisor = self._origins.of(below)
        if divisor.kind is Kind.CONSTANT:
            scalar = below.shape.rank == 0
            return self.leaves(above, (*factors, 1.0 / below)) if scalar else self._linear(tensor, above, factors)
        parts = self.leaves(above)
        if below.shape.rank != 0 or any(leaf.kind is not DivisorKind.NOTHING for leaf in parts):
            return None
        if divisor.kind is Kind.COUNT:
            amount = None if divisor.counted else tf.cast(below, tf.float64)
            kind = DivisorKind.RECORDS if divisor.counted else DivisorKind.AMOUNT
            return [_Leaf(tensor, factors, kind, amount, may_be_empty=not divisor.counted)]
        # Weights or a mask from the data, summed by the user: the divisor must not depend on trained values.
        counts = [] if divisor.kind is not Kind.TOTAL or self._is_trained(below) else self.leaves(below)
        if len(counts) == 1 and counts[0].kind is DivisorKind.NOTHING and not counts[0].factors:
            return [_Leaf(tensor, factors, DivisorKind.AMOUNT, tf.cast(below, tf.float64), may_be_empty=True)]
        return None

    def _reduction(
        self, tensor: tf.Tensor, source: tf.Tensor, kind: str, factors: tuple[tf.Tensor | float, ...]
    ) -> list[_Leaf] | None:
        if source.shape.rank == 0:
            return self.leaves(source, factors)
        if source.op.type == "Pack" and source.shape.rank == 1:
            share = (*factors, 1.0 / len(source.op.inputs)) if kind == "Mean" else factors
            return [leaf for part in source.op.inputs for leaf in self.leaves(part, share)]
        if self._kind(source) is Kind.TOTAL:
            return self._linear(tensor, source, factors)
        if self._kind(tensor) is not Kind.TOTAL:
            return None
        if kind == "Sum":
            return [_Leaf(tensor, factors, DivisorKind.NOTHING)]
        if self._origins.counts_records(source, reduced_axes(tensor.op)):
            return [_Leaf(tensor, factors, DivisorKind.RECORDS)]
        each = tf.maximum(tf.size(tensor), 1)
        amount = tf.cast(tf.size(source), tf.float64) / tf.cast(each, tf.float64)
        return [_Leaf(tensor, factors, DivisorKind.AMOUNT, amount, may_be_empty=True)]

    def _is_trained(self, tensor: tf.Tensor) -> bool:
        """Whether a value is computed from rows or variables, and so has a gradient."""
        return any(
            operation.type.startswith(_READS) or any(self._origins.holds_rows(part) for part in operation.outputs)
            for operation in ancestors(tensor)
        )
