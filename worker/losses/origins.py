"""What a tensor of a traced step holds of its batch: nothing, how many records there are, or values of each record."""

from __future__ import annotations

import sysconfig
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import keras

from elastable.master.backend.lazy import LazyModule, tf
from elastable.worker.keras.structures import TensorLike, TensorStructure
from elastable.worker.losses.origin_rules import CONSTANT, RECORD, Holds, Origin, rule_of
from elastable.worker.losses.recording import LayerCall
from elastable.worker.rows.scope import ALL_ROWS

_utils = LazyModule("tensorflow.python.framework.auto_control_deps_utils")

_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


def ancestors(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """The operations that compute a tensor, each once, its own first."""
    waiting, seen = [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            yield operation
            waiting.extend(part.op for part in operation.inputs)


def operation_named(operation: tf.Operation) -> str:
    """The operation for a message, with the line of the user's program that made it."""
    made = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in operation.traceback or ()
        if not frame.filename.startswith((*_own_folders(), "<"))
        and (not frame.filename.startswith(sysconfig.get_path("stdlib")) or "-packages" in frame.filename)
    ]
    return f"{operation.type} {operation.name!r}" + (f" ({made[-1]})" if made else "")


@lru_cache(maxsize=1)
def _own_folders() -> tuple[str, ...]:
    files = (tf.__file__, keras.__file__, str(Path(__file__).parents[1]))
    return tuple(str(Path(file or "").parent) for file in files)


def changes_of(graph: tf.Graph) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """(operation, handle outside the graph) of each change of a variable, also within loops and functions."""
    outside = {inner.ref(): outer for outer, inner in graph.captures}
    for operation in graph.get_operations():
        for inner in _utils.get_read_write_resource_inputs(operation)[1]:
            handle = outside.get(inner.ref())
            if handle is not None and dtype_of(handle) is not None:
                yield operation, handle


def dtype_of(handle: tf.Tensor) -> tf.DType | None:
    """The dtype of the variable that a handle is of; None: it is of something else, such as a lookup table."""
    data = getattr(handle, "_handle_data", None)
    return tf.as_dtype(data.shape_and_type[0].dtype) if data is not None and data.is_set else None


class Origins:
    """The origins of the tensors of one traced step, whose graph is followed from the batch and the rows on.

    The value of a loss or metric can only be put together from micro-batches where each element comes from one record.

    Args:
        batch: The batch, as symbolic tensors of the graph.
        rows: Tensors that hold rows of tables.
        calls: Calls of layers that keep records apart, the inner ones first.
    """

    def __init__(self, batch: TensorStructure, rows: Sequence[tf.Tensor], calls: Sequence[LayerCall]) -> None:
        self._every = calls
        self._known: dict[Hashable, Origin] = {}
        for number, value in enumerate(tf.nest.flatten(batch)):
            self._known |= _of_input(value, ("part", number))
        self._rows = {tensor.ref() for tensor in rows}
        self._known |= {tensor.ref(): Origin(Holds.MIXED, cause=tensor.op) for tensor in rows}
        operations = tf.nest.flatten(batch, expand_composites=True)[0].graph.get_operations()
        self._numbers: Mapping[tf.Operation, int] = {operation: number for number, operation in enumerate(operations)}
        #: Handle of a variable -> (number of the operation, its type, value) of each assignment, in the graph's order.
        self._assigned: dict[Hashable, list[tuple[int, str, tf.Tensor]]] = {}
        for number, operation in enumerate(operations):
            if operation.type in _ASSIGNS:
                assigned = self._assigned.setdefault(operation.inputs[0].ref(), [])
                assigned.append((number, operation.type, operation.inputs[1]))
        # The outermost call of an output counts.
        self._calls = {
            tensor.ref(): (call, role)
            for call in calls
            for tensor, role in call.outputs
            if self._number(tensor.op) >= call.since
        }

    def of(self, tensor: tf.Tensor) -> Origin:
        """What a tensor of the step holds of the batch."""
        waiting = [tensor]
        while waiting:
            last = waiting[-1]
            if last.ref() in self._known:
                waiting.pop()
                continue
            sources = self._sources(last)
            missing = [part for part in sources if part.ref() not in self._known]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            self._known[last.ref()] = self._found(last, [self._known[part.ref()] for part in sources])
        return self._known[tensor.ref()]

    def counts_records(self, tensor: tf.Tensor, axes: Sequence[int] | None = None) -> bool:
        """Whether along these axes (None: all) a tensor has the number of records, times a constant, of elements."""
        origin = self.of(tensor)
        others = [size for axis, size in enumerate(tensor.shape) if axis != origin.axis and axis in (axes or [axis])]
        return origin.counted and None not in others

    def holds_rows(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is one of those that hold rows of tables."""
        return tensor.ref() in self._rows

    def first_mixed(self, tensors: Sequence[tf.Tensor]) -> tf.Operation | None:
        """The operation because of which one of these tensors holds anything but values record by record."""
        for tensor in tensors:
            origin = self.of(tensor)
            if origin.kind not in (Holds.CONSTANT, Holds.APART):
                return origin.cause or tensor.op
        return None

    def assigned_to(self, tensor: tf.Tensor) -> list[tuple[tf.Tensor, float]]:
        """The summands of a variable's value that the step reads once it has assigned it, with their signs."""
        operation = tensor.op
        found: list[tuple[tf.Tensor, float]] = []
        if operation.type != "ReadVariableOp":
            return found
        number = self._number(operation)
        for at, kind, value in reversed(self._assigned.get(operation.inputs[0].ref(), ())):
            if at < number:
                found.append((value, -1.0 if kind == "AssignSubVariableOp" else 1.0))
                if kind == "AssignVariableOp":
                    break
        return found

    def _number(self, operation: tf.Operation) -> int:
        """The operation's place in the order of the graph."""
        return self._numbers.get(operation, -1)  # -1: it is of another graph

    def _sources(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        if tensor.ref() in self._calls:
            return list(self._calls[tensor.ref()][0].inputs)
        operation = tensor.op
        sources = list(operation.inputs)
        if operation.type in _READS:
            # A variable that the step has assigned before holds what was assigned.
            assigned, number = self._assigned.get(sources[0].ref(), ()), self._number(operation)
            sources += [value for at, _, value in assigned if at < number]
        return sources

    def _found(self, tensor: tf.Tensor, found: Sequence[Origin]) -> Origin:
        all_rows = tensor.op.type == "Identity" and tensor.op.name.rsplit("/", 1)[-1].startswith(ALL_ROWS)
        if all_rows or all(origin.kind is Holds.CONSTANT for origin in found):
            return CONSTANT
        mixed = next((origin for origin in found if origin.kind is Holds.MIXED), None)
        if mixed is not None:
            return mixed
        if tensor.ref() in self._calls:
            call, role = self._calls[tensor.ref()]
            return self._mixed_inside(call) or _called(tensor, found, role)
        made = rule_of(tensor.op)(tensor, found) if tensor.shape.rank is not None else None
        return Origin(Holds.MIXED, cause=tensor.op) if made is None else made

    def _mixed_inside(self, call: LayerCall) -> Origin | None:
        """What the cells in a layer's loop make of records; None: they keep them apart."""
        for cell in call.inside:
            inside = Origins(list(cell.inputs), (), self._every)
            cause = inside.first_mixed([output for output, _ in cell.outputs])
            if cause is not None:
                return Origin(Holds.MIXED, cause=cause)
        return None


def _of_input(value: TensorLike, part: Hashable) -> dict[Hashable, Origin]:
    """Of the components of one input. Those of ragged and sparse tensors are elements, and positions."""
    elements = Origin(Holds.APART, layout=part, counted=False)
    if isinstance(value, tf.RaggedTensor):
        splits = Origin(Holds.PLACES, base=part)
        return {value.flat_values.ref(): elements, **{each.ref(): splits for each in value.nested_row_splits}}
    if isinstance(value, tf.SparseTensor):
        places = Origin(Holds.PLACES, layout=part, counted=False, base=RECORD)
        return {value.values.ref(): elements, value.indices.ref(): places, value.dense_shape.ref(): Origin(Holds.SHAPE)}
    return {value.ref(): Origin(Holds.APART)}


def _called(output: tf.Tensor, found: Sequence[Origin], role: str) -> Origin:
    """A layer that keeps records apart: its first axis is that of its inputs."""
    given = [origin for origin in found if origin.kind in (Holds.APART, Holds.TOTAL, Holds.COUNT)]
    places = [origin for origin in found if origin.kind in (Holds.PLACES, Holds.SHAPE)]
    inside = {
        origin.base if origin.layout == RECORD else origin.layout for origin in places
    }  # of ragged, sparse inputs
    layouts = {origin.layout for origin in given if origin.layout not in inside} | ({RECORD} if places else set())
    first = all(origin.kind is Holds.APART and origin.axis == 0 for origin in given)
    positions = any(origin.kind is Holds.PLACES and origin.base == origin.layout for origin in places)
    if not first or positions or len(layouts) != 1 or not output.shape.rank or output.shape[0] is not None:
        return Origin(Holds.MIXED, cause=output.op)
    (layout,) = layouts
    counted = all(origin.counted for origin in given if origin.layout == layout)
    if role == "places":
        return Origin(Holds.PLACES, base=("part", output.op.name))
    if role == "values":
        return Origin(Holds.APART, layout=("part of a layer", output.op.name), counted=False)
    return Origin(Holds.APART, layout=layout, counted=counted)
