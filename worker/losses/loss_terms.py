"""Splits a traced loss into terms, and finds what each was divided by."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from elastable.master.api import DivisorKind
from elastable.master.backend.lazy import tf
from elastable.worker.losses.origin_rules import Holds, reduced_axes
from elastable.worker.losses.origins import Origins, ancestors, operation_named
from elastable.worker.losses.recording import RecordedLoss

_AVERAGED, _SUMMED = "elastable_averaged", "elastable_summed"
_THROUGH = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Snapshot", "Transpose", "StridedSlice", "GatherV2")
_READS = ("ReadVariable", "ResourceGather", "EagerPyFunc", "PyFunc")


_Factors: TypeAlias = "tuple[tf.Tensor | float, ...]"


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One summand of a loss.

    Attributes:
        value: The term with its factors, a scalar.
        kind: What it was divided by; None: unknown.
        amount: With `DivisorKind.AMOUNT` the divisor, a float64 scalar; else None.
        of_batch: Whether it depends on the batch; a regularizer of weights does not.
        where: The operation that divides, or with an unknown divisor the one that hides it, for messages.
        mixes: Whether that operation mixes the records of a batch, or is not known to keep them apart.
    """

    value: tf.Tensor
    kind: DivisorKind | None
    amount: tf.Tensor | None
    of_batch: bool
    where: str = ""
    mixes: bool = False

    def scaled(self, factor: float) -> LossTerm:
        """The term times a constant."""
        return self if factor == 1 else replace(self, value=self.value * factor)


def averaged(value: tf.Tensor) -> tf.Tensor:
    """Marks a scalar of a loss as a mean over the records of the batch; changes no number.

    For terms of `add_loss` and `compute_loss`, and losses that return a scalar, whose operations do not show it. See
    docs/model-file.md.
    """
    return tf.identity(value, name=_AVERAGED)


def summed(value: tf.Tensor) -> tf.Tensor:
    """Marks a scalar of a loss as a sum over the records of the batch; changes no number. See `averaged`."""
    return tf.identity(value, name=_SUMMED)


def _settled(loss: RecordedLoss, origins: Origins) -> RecordedLoss:
    """The reduction, with what it divided by now that the origins of its values are known."""
    cause = origins.first_mixed(loss.values)
    if cause is not None:
        return replace(loss, kind=None, amount=None, cause=cause)
    if loss.kind is DivisorKind.RECORDS and not origins.counts_records(loss.values[0]):
        return replace(loss, kind=DivisorKind.AMOUNT, amount=tf.cast(tf.size(loss.values[0]), tf.float64))
    return loss


def _term(leaf: _Leaf, loss: tf.Tensor, origins: Origins) -> LossTerm:
    value = leaf.tensor if leaf.tensor.shape.rank == 0 else tf.reduce_sum(leaf.tensor)
    # A scalar added to a value per record would count once per record.
    known = leaf.kind is not None and (loss.shape.rank == 0 or leaf.tensor.shape.rank == loss.shape.rank)
    for factor in leaf.factors:
        value = value * tf.cast(factor, value.dtype)
    origin = origins.of(leaf.tensor)
    cause = leaf.tensor.op if known else leaf.cause or origin.cause or leaf.tensor.op
    return LossTerm(
        tf.cast(value, loss.dtype),
        leaf.kind if known else None,
        leaf.amount if known else None,
        origin.kind is not Holds.CONSTANT,
        operation_named(cause),
        not known and (leaf.cause is not None or origin.kind is Holds.MIXED),
    )


def _is_zero(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and not value.any()


@dataclass(frozen=True, slots=True)
class _Leaf:
    tensor: tf.Tensor
    factors: _Factors
    kind: DivisorKind | None
    amount: tf.Tensor | None = None
    cause: tf.Operation | None = None


class LossTerms:
    """Finds the terms of losses, and of other numbers, that are traced into a graph.

    A version's gradient must equal that of one batch of all its records, so micro-batches are combined term by term: a
    mean over records is weighted by records, a mean over chosen or unmasked values by their number, a sum by nothing.
    The graph is followed back through sums and constant factors. What is unknown is reported, never guessed.

    Args:
        recorded: The reductions of Keras' losses in it, and other tensors with a known divisor.
    """

    def __init__(self, recorded: Sequence[RecordedLoss], origins: Origins) -> None:
        self._recorded = {loss.result.ref(): _settled(loss, origins) for loss in recorded}
        self._origins = origins
        self._sizes: dict[Hashable, tf.Tensor] = {}

    def of(self, number: tf.Tensor) -> list[LossTerm]:
        """The terms of a scalar, or of a value per record (reduction "none"), whose gradient is that of the sum."""
        found = [_Leaf(number, (), None)] if number.shape.rank is None else self._leaves(number)
        return [_term(leaf, number, self._origins) for leaf in found]

    def is_sum(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is a sum over records alone: that of a batch is the sum of those of its parts."""
        return all(leaf.kind is DivisorKind.NOTHING or _is_zero(leaf.tensor) for leaf in self._leaves(tensor))

    def _leaves(self, tensor: tf.Tensor, factors: _Factors = ()) -> list[_Leaf]:
        """The summands of a tensor."""
        if (loss := self._recorded.get(tensor.ref())) is not None:
            return [_Leaf(tensor, factors, loss.kind, loss.amount, loss.cause)]
        operation = tensor.op
        if assigned := self._origins.assigned_to(tensor):
            return [leaf for value, sign in assigned for leaf in self._leaves(value, (*factors, sign))]
        if self._kind(tensor) is Holds.COUNT:
            return [_Leaf(tensor, factors, DivisorKind.NOTHING)]
        if self._kind(tensor) is Holds.CONSTANT:
            return [_Leaf(tensor, factors, DivisorKind.RECORDS)]
        name = operation.name.rsplit("/", 1)[-1]
        if operation.type == "Identity" and name.startswith((_AVERAGED, _SUMMED)):
            marked = DivisorKind.RECORDS if name.startswith(_AVERAGED) else DivisorKind.NOTHING
            return [_Leaf(tensor, factors, marked)]
        return self._inside(tensor, factors) or [_Leaf(tensor, factors, None)]

    def _kind(self, tensor: tf.Tensor) -> Holds:
        return self._origins.of(tensor).kind

    def _inside(self, tensor: tf.Tensor, factors: _Factors) -> list[_Leaf] | None:
        operation, inputs = tensor.op, list(tensor.op.inputs)
        kind = operation.type
        if kind in _THROUGH and (kind != "Cast" or tensor.dtype.is_floating):  # an integer is rounded
            same = inputs[0].shape.rank == tensor.shape.rank == 0
            return self._leaves(inputs[0], factors) if same else self._linear(tensor, inputs[0], factors)
        if kind in ("AddV2", "Add", "AddN"):
            return [leaf for part in inputs for leaf in self._leaves(part, factors)]
        if kind == "Sub":
            return [*self._leaves(inputs[0], factors), *self._leaves(inputs[1], (*factors, -1.0))]
        if kind == "Neg":
            return self._leaves(inputs[0], (*factors, -1.0))
        if kind == "Mul":
            return self._multiple(tensor, inputs, factors)
        if kind in ("RealDiv", "DivNoNan"):
            return self._quotient(tensor, inputs[0], inputs[1], factors)
        if kind in ("Sum", "Mean"):
            return self._reduction(tensor, inputs[0], kind, factors)
        sources = [self._kind(part) for part in inputs]
        if self._kind(tensor) is Holds.TOTAL and all(each in (Holds.CONSTANT, Holds.APART) for each in sources):
            return [_Leaf(tensor, factors, DivisorKind.NOTHING)]
        return None

    def _linear(self, tensor: tf.Tensor, source: tf.Tensor, factors: _Factors) -> list[_Leaf] | None:
        """A tensor that takes every element of `source` times a constant: divided as all of its terms are."""
        if self._kind(tensor) is not Holds.TOTAL:
            return None
        inner = self._leaves(source)
        first = inner[0]
        alike = all((leaf.kind, leaf.amount is first.amount) == (first.kind, True) for leaf in inner)
        if first.kind is None or not alike:
            return None
        return [_Leaf(tensor, factors, first.kind, first.amount)]

    def _multiple(self, tensor: tf.Tensor, inputs: Sequence[tf.Tensor], factors: _Factors) -> list[_Leaf] | None:
        for one, other in (inputs, inputs[::-1]):
            if self._kind(other) is Holds.CONSTANT:
                scalar = other.shape.rank == 0
                return self._leaves(one, (*factors, other)) if scalar else self._linear(tensor, one, factors)
            count = self._origins.of(other)
            if count.kind is Holds.COUNT and count.counted:  # a mean over records times their number
                means = all(leaf.kind is DivisorKind.RECORDS for leaf in self._leaves(one))
                return [_Leaf(tensor, factors, DivisorKind.NOTHING)] if means else None
        return None

    def _quotient(self, tensor: tf.Tensor, above: tf.Tensor, below: tf.Tensor, factors: _Factors) -> list[_Leaf] | None:
        divisor = self._origins.of(below)
        if divisor.kind is Holds.CONSTANT:
            scalar = below.shape.rank == 0
            return self._leaves(above, (*factors, 1.0 / below)) if scalar else self._linear(tensor, above, factors)
        parts = self._leaves(above)
        if below.shape.rank == 0 and all(leaf.kind is DivisorKind.RECORDS for leaf in parts):
            return self._ratio_of_means(tensor, below, factors)
        if below.shape.rank != 0 or any(leaf.kind is not DivisorKind.NOTHING for leaf in parts):
            return None
        if divisor.kind is Holds.COUNT:
            amount = None if divisor.counted else tf.cast(below, tf.float64)
            kind = DivisorKind.RECORDS if divisor.counted else DivisorKind.AMOUNT
            return [_Leaf(tensor, factors, kind, amount)]
        # Weights or a mask from the data, summed by the user: the divisor must not depend on trained values.
        counts = [] if divisor.kind is not Holds.TOTAL or self._is_trained(below) else self._leaves(below)
        if len(counts) == 1 and counts[0].kind is DivisorKind.NOTHING and not counts[0].factors:
            return [_Leaf(tensor, factors, DivisorKind.AMOUNT, tf.cast(below, tf.float64))]
        return None

    def _ratio_of_means(self, tensor: tf.Tensor, below: tf.Tensor, factors: _Factors) -> list[_Leaf] | None:
        """A mean over records divided by another, of weights or a mask from the data: their sums divided."""
        counts = self._leaves(below)
        mean = counts[0].tensor.op
        if len(counts) > 1 or counts[0].factors or counts[0].kind is not DivisorKind.RECORDS or mean.type != "Mean":
            return None
        if self._is_trained(below) or self._kind(below) is not Holds.TOTAL:
            return None
        amount = tf.cast(below, tf.float64) * tf.cast(tf.size(mean.inputs[0]), tf.float64)
        return [_Leaf(tensor, factors, DivisorKind.AMOUNT, amount)]

    def _reduction(self, tensor: tf.Tensor, source: tf.Tensor, kind: str, factors: _Factors) -> list[_Leaf] | None:
        if source.shape.rank == 0:
            return self._leaves(source, factors)
        if source.op.type == "Pack" and source.shape.rank == 1:
            share = (*factors, 1.0 / len(source.op.inputs)) if kind == "Mean" else factors
            return [leaf for part in source.op.inputs for leaf in self._leaves(part, share)]
        if self._kind(source) is Holds.TOTAL:
            return self._linear(tensor, source, factors)
        if self._kind(tensor) is not Holds.TOTAL:
            return None
        if kind == "Sum":
            return [_Leaf(tensor, factors, DivisorKind.NOTHING)]
        if self._origins.counts_records(source, reduced_axes(tensor.op)):
            return [_Leaf(tensor, factors, DivisorKind.RECORDS)]
        if tensor.ref() not in self._sizes:
            each = tf.maximum(tf.size(tensor), 1)
            self._sizes[tensor.ref()] = tf.cast(tf.size(source), tf.float64) / tf.cast(each, tf.float64)
        return [_Leaf(tensor, factors, DivisorKind.AMOUNT, self._sizes[tensor.ref()])]

    def _is_trained(self, tensor: tf.Tensor) -> bool:
        """Whether a value is computed from rows or variables, and so has a gradient."""
        return any(
            operation.type.startswith(_READS) or any(self._origins.holds_rows(part) for part in operation.outputs)
            for operation in ancestors(tensor)
        )
