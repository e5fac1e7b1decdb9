"""Whether a push fits the job's model: everything is checked before anything changes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadGradient, NotFinite, TableNotFound
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.shards.version_sums import require_finite_sums
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.tables.checks import require_finite_of, require_gradients, require_ids
from elastable.master.api import AsyncPushId, Divisor, EvaluationReport, GradientPart, Push, Tensor

_MOST_PARTS = 64
_MOST_RECORDS = 2**32  # of a micro-batch; all that are ever trained are counted in an int64 of the status


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A dense tensor: the variable's path in the model, its shape and NumPy dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


@dataclass(frozen=True, slots=True)
class Expected:
    """What every push of a job holds.

    Attributes:
        variables: Trainable dense variables, in model order.
        states: Non-trainable variables, in model order.
        metrics: Metric state; None: not known here, any is taken.
        tables: Table name -> spec.
        may_overflow: Whether gradients may hold NaN or Inf (`DensePart.may_overflow`).
        rows_elsewhere: Whether gradients of rows go to store servers, and not here.
    """

    variables: tuple[TensorSpec, ...] = ()
    states: tuple[TensorSpec, ...] = ()
    metrics: tuple[TensorSpec, ...] | None = None
    tables: Mapping[str, TableSpec] = field(default_factory=dict)
    may_overflow: bool = False
    rows_elsewhere: bool = False


def check_push(push: Push, expected: Expected) -> None:
    """Refuses a push whose tensors are not those of the model and its tables.

    Raises:
        BadGradient: another number, shape or dtype of tensors, or more records than a micro-batch has.
        TableNotFound: slices of a table that is not there.
        BadIds, IdOutOfRange: naming table, id and position.
    """
    if push.records > _MOST_RECORDS:
        raise BadGradient(f"a push of {push.records} records: a micro-batch has at most {_MOST_RECORDS}")
    _check_tensors("dense gradient", push.dense, expected.variables)
    _check_tensors("state", push.states, expected.states)
    if expected.metrics is not None:
        _check_tensors("metric", push.metrics, expected.metrics)
    _check_slices(push.slices, expected)
    _check_losses(push.losses, push.metrics)
    if push.divisor is not None:
        _check_divisor(push.divisor)
    if len(push.parts) > _MOST_PARTS:
        raise BadGradient(f"a push of {len(push.parts)} further parts: a loss has at most {_MOST_PARTS}")
    for part in push.parts:
        _check_divisor(part.divisor)
        _check_dense_of(part, expected)
        _check_slices(part.slices, expected)
        _check_losses(part.losses, push.metrics)
        _check_penalties(part.penalties, expected)
    _check_losses(push.once, push.metrics)


def _check_slices(every: Mapping[str, Slices], expected: Expected) -> None:
    if expected.rows_elsewhere and every:
        raise BadGradient(
            f"gradient of table {next(iter(every))!r}: the job's rows are at store servers, and so are their gradients"
        )
    for table, slices in every.items():
        spec = _known(table, expected)
        require_gradients(spec, len(require_ids(spec, slices.indices)), slices.values)


def _check_dense_of(part: GradientPart, expected: Expected) -> None:
    for place, tensor in part.dense.items():
        if not 0 <= place < len(expected.variables):
            raise BadGradient(f"gradient of variable {place} where the model has {len(expected.variables)}")
        _check_tensors("dense gradient", [tensor], [expected.variables[place]])


def _check_divisor(divisor: Divisor) -> None:
    if not (math.isfinite(divisor.amount) and divisor.amount >= 0):
        raise BadGradient(
            f"a loss was divided by {divisor.amount}: the sample weights of a micro-batch must add up to a number "
            "that is not negative"
        )


def _check_losses(places: Iterable[int], metrics: Sequence[Tensor]) -> None:
    for place in places:
        # The total of a mean and its count.
        if not 0 <= place < len(metrics) - 1 or any(metrics[at].shape for at in (place, place + 1)):
            raise BadGradient(f"a loss for metric tensor {place} of {len(metrics)}, which is no total of a mean")


def _check_penalties(penalties: Mapping[str, Slices], expected: Expected) -> None:
    for table, slices in penalties.items():
        count = len(require_ids(_known(table, expected), slices.indices))
        if slices.values.shape != (count, 1):
            raise BadGradient(f"penalties of table {table!r}: want [{count}, 1], got {list(slices.values.shape)}")


def _known(table: str, expected: Expected) -> TableSpec:
    spec = expected.tables.get(table)
    if spec is None:
        known = ", ".join(sorted(expected.tables)) or "none"
        raise TableNotFound(f"gradient for table {table!r}, which is not there (tables: {known})")
    return spec


def check_finite(push: Push, expected: Expected) -> None:
    """Refuses NaN and Inf in gradients, unless they may overflow, and in states; the push fits (`check_push`).

    Of an asynchronous push, which makes a version alone, also in the sums that the version is made of.

    Raises:
        NotFinite: naming the variable, or the table and id; also where the worker or a store server has said so.
    """
    if push.not_finite:
        raise NotFinite(printable(push.not_finite))
    _refuse_not_finite("state", push.states, expected.states)
    if expected.may_overflow:
        return
    _refuse_not_finite("gradient of variable", push.dense, expected.variables)
    for part in push.parts:
        for place, tensor in part.dense.items():
            if not np.isfinite(tensor).all():
                raise NotFinite(f"gradient of variable {expected.variables[place].name!r} holds NaN or Inf")
    every = [push.slices]
    for part in push.parts:
        every.append(part.slices)
    for of_part in every:
        for table, slices in of_part.items():
            require_finite_of(table, slices.indices, slices.values)
    if isinstance(push.id, AsyncPushId):
        require_finite_sums(expected.tables, every)
        for place in {place for part in push.parts for place in part.dense}:
            if not np.isfinite(_summed(push, place)).all():
                raise NotFinite(
                    f"gradient of variable {expected.variables[place].name!r}: the parts' sum is not finite"
                )


def _summed(push: Push, place: int) -> Tensor:
    """The gradient of a dense variable, of all parts together."""
    first = push.dense[place]
    with np.errstate(over="ignore"):
        total = first.astype(np.result_type(first.dtype, np.float32))
        for part in push.parts:
            total += part.dense.get(place, 0)
        return total.astype(first.dtype)


def _refuse_not_finite(what: str, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    for tensor, spec in zip(tensors, specs, strict=True):
        if np.issubdtype(tensor.dtype, np.floating) and not np.isfinite(tensor).all():
            raise NotFinite(f"{what} {spec.name!r} holds NaN or Inf")


def check_evaluation(report: EvaluationReport, expected: Expected) -> None:
    """Refuses metric state that is not that of the model.

    Raises:
        BadGradient: another number, shape or dtype of tensors.
    """
    if expected.metrics is not None:
        _check_tensors("metric", report.metrics, expected.metrics)


def _check_tensors(what: str, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    if len(tensors) != len(specs):
        names = ", ".join(spec.name for spec in specs) or "none"
        raise BadGradient(f"{len(tensors)} {what} tensors where the model has {len(specs)}: {names}")
    for tensor, spec in zip(tensors, specs, strict=True):
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise BadGradient(
                f"{what} of {spec.name!r}: want {spec.dtype} {list(spec.shape)}, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
