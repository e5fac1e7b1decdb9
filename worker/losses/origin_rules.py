"""What operations make of tensors that hold values of a batch record by record: the rules of `Origins`."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, TypeAlias

from elastable.master.backend.lazy import tf

#: The layout of an axis with one entry for each record.
RECORD: Hashable = "record"

_ELEMENTWISE = (
    "Abs Acos Acosh Add AddN AddV2 AccumulateNV2 ApproximateEqual AsString Asin Asinh Atan Atan2 Atanh Betainc "
    "Bitcast BitwiseAnd BitwiseOr BitwiseXor Bucketize Cast Ceil CheckNumerics "
    "ClipByValue Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu EnsureShape Equal Erf Erfc Erfinv Exp Expm1 "
    "Floor FloorDiv FloorMod Greater GreaterEqual Identity Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan "
    "LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr LookupTableFindV2 Maximum "
    "Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Pow PreventGradient Real RealDiv Reciprocal "
    "RegexReplace Relu Relu6 RightShift Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Snapshot Softplus "
    "Softsign Sqrt Square SquaredDifference StaticRegexReplace StopGradient StringLength StringLower StringStrip "
    "StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Sub Tan Tanh TruncateDiv TruncateMod "
    "Xdivy Xlog1py Xlogy ZerosLike Zeta"
)
#: Operation -> how many of the last axes it works along; the others are batches to it.
_ALONG_LAST = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopK", "TopKV2", "NthElement", "FFT", "IFFT", "RFFT", "IRFFT"), 1),
    **dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "BiasAdd"), 1),
    **dict.fromkeys(("SparseSoftmaxCrossEntropyWithLogits", "MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"), 0),
    **dict.fromkeys(("MatrixBandPart", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3", "Cholesky"), 2),
    **dict.fromkeys(("MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant", "MatrixSetDiagV3"), 2),
    **dict.fromkeys(("Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "LRN", "ResizeBilinear"), 3),
    **dict.fromkeys(("ResizeNearestNeighbor", "SpaceToDepth", "DepthToSpace"), 3),
    **dict.fromkeys(("Conv3D", "MaxPool3D", "AvgPool3D"), 4),
}
#: Operation -> which of its inputs names the axes that it works along.
_AXES_NAMED = {"Cumsum": 1, "Cumprod": 1, "ReverseV2": 1, "Roll": 2, "Split": 0, "SplitV": 2}
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin", "L2Loss")
_DIVISIONS = ("RealDiv", "Div", "DivNoNan")
_LINEAR = (*_DIVISIONS, "Add", "AddV2", "AddN", "Sub", "Neg", "Cast", "Identity", "Snapshot", "Mul", "StopGradient")
_RANDOM = ("Random", "StatelessRandom", "TruncatedNormal", "StatelessTruncatedNormal", "ParameterizedTruncated")


class Holds(Enum):
    """What a tensor holds of the batch.

    `CONSTANT`: nothing. `COUNT`: a scalar, how many records or elements there are, times a constant. `SHAPE`: a shape,
    one of whose entries is such a count, or a number computed from it otherwise. `APART`: along one axis, values of one
    record each. `PLACES`: along one axis, positions of records or elements in the batch. `TOTAL`: sums or means of such
    values, and constant multiples of them. `MIXED`: anything else.
    """

    CONSTANT = auto()
    COUNT = auto()
    SHAPE = auto()
    APART = auto()
    PLACES = auto()
    TOTAL = auto()
    MIXED = auto()


@dataclass(frozen=True, slots=True)
class Origin:
    """What a tensor holds of the batch.

    Attributes:
        kind: See `Holds`.
        axis: Of `APART` and `PLACES`: the axis; of `SHAPE`: the entry that counts.
        layout: What lies along the axis: records, or elements chosen from them. Aligned tensors have one.
        counted: Whether the length of the axis is the number of records times a constant.
        base: Of `PLACES`: the layout that the positions are positions in.
        cause: Of `MIXED`: the operation that mixes.
    """

    kind: Holds
    axis: int = 0
    layout: Hashable = RECORD
    counted: bool = True
    base: Hashable = None
    cause: tf.Operation | None = None


CONSTANT = Origin(Holds.CONSTANT)
_TOTAL = Origin(Holds.TOTAL)


_Found = Sequence[Origin]
Rule: TypeAlias = "Callable[[tf.Tensor, _Found], Origin | None]"
"""(a tensor, the origins of its operation's inputs) -> its origin; None: it mixes records, as without a rule."""


def rule_of(operation: tf.Operation) -> Rule:
    """The rule of an operation."""
    kind: str = operation.type
    if kind.startswith(_RANDOM) and not kind.endswith(("Shuffle", "Crop")):
        return _filled
    return _RULES.get(kind, lambda tensor, found: None)


def _elementwise(tensor: tf.Tensor, found: _Found) -> Origin | None:
    operation = tensor.op
    kinds = {origin.kind for origin in found if origin.kind is not Holds.CONSTANT}
    first = next(place for place, origin in enumerate(found) if origin.kind is not Holds.CONSTANT)
    if kinds == {Holds.TOTAL}:
        divided = operation.type in _DIVISIONS and found[1].kind is not Holds.CONSTANT
        squared = operation.type == "Mul" and len(found) == sum(origin.kind is Holds.TOTAL for origin in found)
        rounded = operation.type == "Cast" and not operation.outputs[0].dtype.is_floating
        return _TOTAL if operation.type in _LINEAR and not (divided or squared or rounded) else None
    if kinds == {Holds.COUNT} or kinds == {Holds.SHAPE}:
        return _count_arithmetic(operation, found, first)
    if kinds == {Holds.PLACES} and len(found) == 1:
        return found[0]
    return _aligned(tensor, found) if kinds == {Holds.APART} else None


def _count_arithmetic(operation: tf.Operation, found: _Found, first: int) -> Origin:
    alone = sum(origin.kind is not Holds.CONSTANT for origin in found) == 1
    if operation.type in ("Cast", "Identity"):
        return found[first]
    scaled = operation.type == "Mul" or (operation.type in _DIVISIONS and first == 0)
    return replace(found[first], layout=(operation.name,)) if alone and scaled else Origin(Holds.SHAPE, axis=-1)


def _aligned(tensor: tf.Tensor, found: _Found) -> Origin | None:
    """Elementwise with broadcasting: the records of all operands lie along one axis, counted from the last."""
    operands = list(zip(tensor.op.inputs, found, strict=True))
    if tensor.op.type == "Select" and operands[0][0].shape.rank == 1 and tensor.shape.rank > 1:
        return found[0] if all(o.kind is Holds.CONSTANT or o == found[0] for o in found[1:]) else None
    dependent = [(source.shape.rank - origin.axis, origin) for source, origin in operands if origin.kind is Holds.APART]
    places = {place for place, _ in dependent}
    if len(places) != 1 or len({origin.layout for _, origin in dependent}) != 1:
        return None
    (place,) = places
    for source, origin in operands:
        rank = source.shape.rank
        if origin.kind is Holds.CONSTANT and (rank is None or (rank >= place and source.shape[rank - place] != 1)):
            return None
    counted = all(origin.counted for _, origin in dependent)
    return replace(dependent[0][1], axis=tensor.shape.rank - place, counted=counted)


def _along_last(tensor: tf.Tensor, found: _Found) -> Origin | None:
    source, origin = tensor.op.inputs[0], found[0]
    rank, used = source.shape.rank, _ALONG_LAST[tensor.op.type]
    if origin.kind is not Holds.APART or rank is None or origin.axis >= rank - used:
        return None
    others = [other for other in found[1:] if other.kind is not Holds.CONSTANT]
    same = all((other.kind, other.axis, other.layout) == (Holds.APART, origin.axis, origin.layout) for other in others)
    return origin if same else None


def reduced_axes(operation: tf.Operation) -> list[int] | None:
    """The axes that a reduction reduces, ascending; None: they are not known when it is traced."""
    rank = operation.inputs[0].shape.rank
    given = tf.get_static_value(operation.inputs[1])
    if given is None or rank is None:
        return None
    return sorted(int(axis) % rank for axis in given.reshape(-1)) if rank else []


def _reduction(tensor: tf.Tensor, found: _Found) -> Origin | None:
    source, origin, kind = tensor.op.inputs[0], found[0], tensor.op.type
    if kind == "Prod" and origin.kind is Holds.SHAPE and source.shape.rank == 1 and origin.axis >= 0:
        layout = origin.layout if source.shape[0] == 1 else (tensor.op.name,)
        return replace(origin, kind=Holds.COUNT, axis=0, layout=layout)
    if kind == "L2Loss":
        return _TOTAL if origin.kind is Holds.APART else None
    if source.shape.rank is None or found[1].kind is not Holds.CONSTANT:
        return None
    axes = reduced_axes(tensor.op)
    if origin.kind is Holds.TOTAL:
        return origin if kind in ("Sum", "Mean") else None
    if axes is None or origin.kind is not Holds.APART:
        return None
    if origin.axis in axes:
        return _TOTAL if kind in ("Sum", "Mean") else None
    kept = kind not in ("ArgMax", "ArgMin") and tensor.op.get_attr("keep_dims")
    return replace(origin, axis=origin.axis - (0 if kept else sum(axis < origin.axis for axis in axes)))


def _along_named(tensor: tf.Tensor, found: _Found) -> Origin | None:
    """Works along axes that an input names: records may not lie along one of them."""
    place = _AXES_NAMED[tensor.op.type]
    axes, origin = tf.get_static_value(tensor.op.inputs[place]), found[1 if place == 0 else 0]
    if axes is None or origin.kind is not Holds.APART:
        return None
    return None if origin.axis in [int(axis) % tensor.shape.rank for axis in axes.reshape(-1)] else origin


def _shape(tensor: tf.Tensor, found: _Found) -> Origin | None:
    origin, source = found[tensor.value_index if tensor.op.type == "ShapeN" else 0], tensor.op.inputs[0]
    if origin.kind in (Holds.CONSTANT, Holds.TOTAL) or tensor.op.type == "Rank":
        return CONSTANT
    if origin.kind not in (Holds.APART, Holds.PLACES):
        return None
    if tensor.op.type == "Size":
        counted = origin.counted and None not in [s for a, s in enumerate(source.shape) if a != origin.axis]
        layout = origin.layout if source.shape.rank == 1 else (tensor.op.name,)
        return Origin(Holds.COUNT, layout=layout, counted=counted)
    dynamic = [size for axis, size in enumerate(source.shape) if axis != origin.axis and size is None]
    return Origin(Holds.SHAPE, axis=origin.axis, layout=origin.layout, counted=origin.counted and not dynamic)


def _stacked(tensor: tf.Tensor, found: _Found) -> Origin | None:
    dependent = [(place, origin) for place, origin in enumerate(found) if origin.kind is not Holds.CONSTANT]
    kinds = {origin.kind for _, origin in dependent}
    axis = tensor.op.get_attr("axis") % tensor.shape.rank
    if kinds == {Holds.COUNT} and tensor.shape.rank == 1:
        place, origin = dependent[0]
        return replace(origin, kind=Holds.SHAPE, axis=place) if len(dependent) == 1 else None
    if kinds == {Holds.TOTAL}:
        return _TOTAL
    layouts = {(origin.axis, origin.layout) for _, origin in dependent}
    if len(layouts) != 1 or not kinds <= {Holds.APART, Holds.PLACES}:
        return None
    origin = dependent[0][1]
    if Holds.PLACES in kinds and (found[0].kind is not Holds.PLACES or axis != tensor.shape.rank - 1):
        return None
    if len(dependent) < len(found) and any(
        source.shape.rank is None or source.shape[origin.axis] != 1
        for source, other in zip(tensor.op.inputs, found, strict=True)
        if other.kind is Holds.CONSTANT
    ):
        return None
    return replace(origin, axis=origin.axis + (axis <= origin.axis), counted=all(o.counted for _, o in dependent))


def _joined(tensor: tf.Tensor, found: _Found) -> Origin | None:
    *sources, axis_of = tensor.op.inputs
    found, axis = found[:-1], tf.get_static_value(axis_of)
    dependent = [origin for origin in found if origin.kind is not Holds.CONSTANT]
    kinds = {origin.kind for origin in dependent}
    if axis is None or not dependent:
        return None
    if kinds == {Holds.SHAPE}:
        return _joined_shapes(sources, found)
    if kinds == {Holds.TOTAL}:
        return _TOTAL
    axis = int(axis) % tensor.shape.rank
    layouts = {(origin.axis, origin.layout) for origin in dependent}
    if kinds not in ({Holds.APART}, {Holds.PLACES, Holds.APART}, {Holds.PLACES}) or len(layouts) != 1:
        return None
    if Holds.PLACES in kinds and (found[0].kind is not Holds.PLACES or axis != tensor.shape.rank - 1):
        return None
    origin = replace(dependent[0], counted=all(each.counted for each in dependent))
    if axis != origin.axis:
        return origin if len(dependent) == len(found) else None
    # One after the other: each element is of one record, in another order than that of the records.
    return replace(origin, layout=("joined", len(found), origin.layout)) if len(dependent) == len(found) else None


def _joined_shapes(sources: Sequence[tf.Tensor], found: _Found) -> Origin | None:
    start = 0
    counting: Origin | None = None
    for source, origin in zip(sources, found, strict=True):
        if origin.kind is Holds.SHAPE:
            if counting is not None or origin.axis < 0:
                return Origin(Holds.SHAPE, axis=-1)
            counting = replace(origin, axis=start + origin.axis)
        if source.shape.rank != 1 or (source.shape[0] is None and counting is None):
            return None
        start += source.shape[0] or 0
    return counting


def _unstacked(tensor: tf.Tensor, found: _Found) -> Origin | None:
    origin, axis = found[0], tensor.op.get_attr("axis") % (tensor.shape.rank + 1)
    if origin.kind is Holds.SHAPE:
        return _entry(origin, tensor.value_index)
    if origin.kind is Holds.TOTAL:
        return origin
    if origin.kind is not Holds.APART or axis == origin.axis:
        return None
    return replace(origin, axis=origin.axis - (axis < origin.axis))


def _entry(shape: Origin, place: int) -> Origin:
    if shape.axis < 0:
        return shape
    return replace(shape, kind=Holds.COUNT, axis=0) if place == shape.axis else CONSTANT


def _sliced(tensor: tf.Tensor, found: _Found) -> Origin | None:
    operation, source, origin = tensor.op, tensor.op.inputs[0], found[0]
    begins, ends, strides = (tf.get_static_value(part) for part in operation.inputs[1:4])
    if origin.kind is Holds.TOTAL:
        return origin if all(other.kind is Holds.CONSTANT for other in found[1:]) else None
    if begins is None or strides is None or source.shape.rank is None or origin.kind is Holds.CONSTANT:
        return None
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {name: operation.get_attr(f"{name}_mask") for name in names}
    if origin.kind is Holds.SHAPE:
        return None if ends is None else _sliced_shape(origin, source, masks, begins, ends, strides)
    if origin.kind not in (Holds.APART, Holds.PLACES):
        return None
    at, out = 0, 0
    for place in range(len(begins)):
        bit = 1 << place
        if masks["ellipsis"] & bit:
            new = sum(bool(masks["new_axis"] & (1 << later)) for later in range(place + 1, len(begins)))
            skipped = source.shape.rank - at - (len(begins) - place - 1 - new)
            if at <= origin.axis < at + skipped:
                return replace(origin, axis=out + origin.axis - at)
            at, out = at + skipped, out + skipped
            continue
        if masks["new_axis"] & bit:
            out += 1
            continue
        if at == origin.axis:
            whole = masks["begin"] & bit and masks["end"] & bit and strides[place] == 1
            return replace(origin, axis=out) if whole and not masks["shrink_axis"] & bit else None
        at, out = at + 1, out + (0 if masks["shrink_axis"] & bit else 1)
    return replace(origin, axis=out + origin.axis - at)


def _sliced_shape(
    origin: Origin, source: tf.Tensor, masks: Mapping[str, int], begins: Any, ends: Any, strides: Any
) -> Origin | None:
    if source.shape.rank != 1 or len(begins) != 1 or masks["ellipsis"] or masks["new_axis"] or source.shape[0] is None:
        return None
    size = source.shape[0]
    if masks["shrink_axis"]:
        return _entry(origin, int(begins[0]) % size)
    first, last = None if masks["begin"] else int(begins[0]), None if masks["end"] else int(ends[0])
    kept = range(size)[first : last : int(strides[0])]
    if origin.axis < 0:
        return origin
    return replace(origin, axis=kept.index(origin.axis)) if origin.axis in kept else CONSTANT


def _cut(tensor: tf.Tensor, found: _Found) -> Origin | None:
    """`Slice`: all records, a part of each."""
    begin, size = (tf.get_static_value(part) for part in tensor.op.inputs[1:3])
    origin = found[0]
    if origin.kind is Holds.SHAPE:
        return Origin(Holds.SHAPE, axis=-1)
    if begin is None or size is None or origin.kind is not Holds.APART:
        return None
    return origin if begin[origin.axis] == 0 and size[origin.axis] == -1 else None


def _reshaped(tensor: tf.Tensor, found: _Found) -> Origin | None:
    source, origin = tensor.op.inputs[0], found[0]
    if origin.kind is Holds.TOTAL and found[1].kind is Holds.CONSTANT:
        return origin
    if origin.kind in (Holds.COUNT, Holds.SHAPE) and tensor.shape.rank == 1 and source.shape.rank == 0:
        return replace(origin, kind=Holds.SHAPE, axis=0)
    if origin.kind in (Holds.COUNT, Holds.SHAPE) and tensor.shape.rank == 0:
        return replace(origin, kind=Holds.COUNT) if origin.axis == 0 else None
    if origin.kind is Holds.PLACES and tensor.shape.rank == 1 and source.shape.rank <= 2:
        return replace(origin, axis=0)
    if origin.kind is not Holds.APART or not tensor.shape.rank or source.shape.rank is None:
        return None
    kept, shape = _same_place(list(source.shape), list(tensor.shape), origin.axis), found[1]
    if kept is not None:
        return replace(origin, axis=kept)
    if source.shape.rank == 1 and (shape.kind, shape.layout) == (Holds.SHAPE, origin.layout) and shape.axis >= 0:
        return replace(origin, axis=shape.axis)
    if origin.axis != 0 or tensor.shape[0] is not None:
        return None
    if shape.kind is Holds.SHAPE and shape.axis == 0 and shape.layout == origin.layout:
        return origin
    unfolded = origin.layout[1] if isinstance(origin.layout, tuple) and origin.layout[0] == "folded" else None
    if unfolded is not None and (shape.kind, shape.axis, shape.layout) == (Holds.SHAPE, 0, unfolded):
        return replace(origin, layout=unfolded)
    return _folded(source, tensor, origin)


def _folded(source: tf.Tensor, tensor: tf.Tensor, origin: Origin) -> Origin | None:
    """The first axis times some of the next ones; what is behind them stays."""
    inner, outer = list(source.shape[1:]), list(tensor.shape[1:])
    kept = len(outer)
    if None not in inner and None not in outer:
        before, after = math.prod(inner), math.prod(outer)
        if not after or before % after:
            return None
        return replace(origin, layout=("folded", origin.layout, before // after))
    if kept <= len(inner) and inner[len(inner) - kept :] == outer and None not in outer:
        return replace(origin, layout=("folded", origin.layout, None), counted=False)
    return None


def _same_place(source: Sequence[Any], target: Sequence[Any], axis: int) -> int | None:
    """The axis of the records after a reshape of the other axes, all of them known; None: it is unknown."""
    if source.count(None) != 1 or target.count(None) != 1 or source[axis] is not None:
        return None
    at = target.index(None)
    before, after = (source[:axis], target[:at]), (source[axis + 1 :], target[at + 1 :])
    return at if all(math.prod(one) == math.prod(other) for one, other in (before, after)) else None


def _expanded(tensor: tf.Tensor, found: _Found) -> Origin | None:
    axis, origin = tf.get_static_value(tensor.op.inputs[1]), found[0]
    if axis is None:
        return None
    if origin.kind is Holds.COUNT:
        return replace(origin, kind=Holds.SHAPE, axis=0)
    if origin.kind is Holds.TOTAL:
        return origin
    if origin.kind not in (Holds.APART, Holds.PLACES):
        return None
    return replace(origin, axis=origin.axis + (int(axis.reshape(-1)[0]) % tensor.shape.rank <= origin.axis))


def _squeezed(tensor: tf.Tensor, found: _Found) -> Origin | None:
    source, origin = tensor.op.inputs[0], found[0]
    if origin.kind is Holds.TOTAL:
        return origin
    if origin.kind not in (Holds.APART, Holds.PLACES) or source.shape.rank is None:
        return None
    dropped = [axis % source.shape.rank for axis in tensor.op.get_attr("squeeze_dims")]
    dropped = dropped or [axis for axis, size in enumerate(source.shape) if size == 1]
    if origin.axis in dropped:
        return None
    return replace(origin, axis=origin.axis - sum(axis < origin.axis for axis in dropped))


def _transposed(tensor: tf.Tensor, found: _Found) -> Origin | None:
    order, origin = tf.get_static_value(tensor.op.inputs[1]), found[0]
    if origin.kind is Holds.TOTAL and order is not None:
        return origin
    if order is None or origin.kind is not Holds.APART:
        return None
    return replace(origin, axis=list(order).index(origin.axis))


def _tiled(tensor: tf.Tensor, found: _Found) -> Origin | None:
    origin, source = found[0], tensor.op.inputs[0]
    if origin.kind is Holds.CONSTANT:
        return _spread(tensor, found[1], source)
    times = tf.get_static_value(tensor.op.inputs[1])
    if times is None or origin.kind is not Holds.APART:
        return None
    copies = int(times[origin.axis])
    return origin if copies == 1 else replace(origin, layout=("joined", copies, origin.layout))


def _spread(tensor: tf.Tensor, shape: Origin, source: tf.Tensor) -> Origin | None:
    """A constant that is repeated for each record."""
    if shape.kind is not Holds.SHAPE or shape.axis < 0 or source.shape.rank is None:
        return None
    place = tensor.shape.rank - shape.axis
    if source.shape.rank >= place and source.shape[source.shape.rank - place] != 1:
        return None
    return Origin(Holds.APART, axis=shape.axis, layout=shape.layout, counted=shape.counted)


def _broadcast(tensor: tf.Tensor, found: _Found) -> Origin | None:
    origin, source = found[0], tensor.op.inputs[0]
    if origin.kind is Holds.CONSTANT:
        return _spread(tensor, found[1], source)
    if origin.kind is not Holds.APART or source.shape.rank is None:
        return None
    axis = tensor.shape.rank - source.shape.rank + origin.axis
    shape = found[1]
    same = (shape.kind, shape.axis, shape.layout) == (Holds.SHAPE, axis, origin.layout)
    return replace(origin, axis=axis) if same or shape.kind is Holds.CONSTANT else None


def _filled(tensor: tf.Tensor, found: _Found) -> Origin | None:
    """A constant or random numbers of a shape."""
    shape = found[0]
    if shape.kind is not Holds.SHAPE or shape.axis < 0 or any(o.kind is not Holds.CONSTANT for o in found[1:]):
        return None
    return Origin(Holds.APART, axis=shape.axis, layout=shape.layout, counted=shape.counted)


def _counted_up(tensor: tf.Tensor, found: _Found) -> Origin | None:
    limit = found[1]
    start, step = (tf.get_static_value(tensor.op.inputs[place]) for place in (0, 2))
    if limit.kind is not Holds.COUNT or start != 0 or step != 1:
        return None
    return Origin(Holds.PLACES, layout=limit.layout, counted=limit.counted, base=limit.layout)


def _padded(tensor: tf.Tensor, found: _Found) -> Origin | None:
    widths, origin = tf.get_static_value(tensor.op.inputs[1]), found[0]
    if widths is None or origin.kind is not Holds.APART or any(o.kind is not Holds.CONSTANT for o in found[1:]):
        return None
    return origin if not widths[origin.axis].any() else None


def _one_hot(tensor: tf.Tensor, found: _Found) -> Origin | None:
    origin, axis = found[0], tensor.op.get_attr("axis") % tensor.shape.rank
    if origin.kind is not Holds.APART or any(other.kind is not Holds.CONSTANT for other in found[1:]):
        return None
    return replace(origin, axis=origin.axis + (axis <= origin.axis))


def _where(tensor: tf.Tensor, found: _Found) -> Origin | None:
    origin = found[0]
    if origin.kind is not Holds.APART or origin.axis != 0:
        return None
    return Origin(Holds.PLACES, layout=("where", _root(tensor.op.inputs[0]).ref()), counted=False, base=origin.layout)


def _root(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in ("Identity", "Reshape", "Squeeze", "ExpandDims", "Snapshot"):
        tensor = tensor.op.inputs[0]
    return tensor


def _partitioned(tensor: tf.Tensor, found: _Found) -> Origin | None:
    values, parts = found
    alike = (values.kind, values.axis, values.layout) == (parts.kind, 0, parts.layout)
    if not alike or values.kind is not Holds.APART:
        return None
    layout = ("part of", _root(tensor.op.inputs[1]).ref(), tensor.value_index)
    return Origin(Holds.APART, layout=layout, counted=False)


def _gathered(tensor: tf.Tensor, found: _Found) -> Origin | None:
    operation = tensor.op
    read = operation.type == "ResourceGather"
    params, indices = (CONSTANT if read else found[0]), found[1]
    axis_given = 0 if read else tf.get_static_value(operation.inputs[2])
    source, places, batch_dims = operation.inputs[0], operation.inputs[1], operation.get_attr("batch_dims")
    if axis_given is None or places.shape.rank is None or (not read and source.shape.rank is None):
        return None
    axis = int(axis_given) % (source.shape.rank or 1) if not read else 0
    if params.kind is Holds.SHAPE and indices.kind is Holds.CONSTANT and places.shape.rank <= 1:
        return _picked_entries(params, places, source)
    if params.kind is Holds.TOTAL and indices.kind is Holds.CONSTANT:
        return params
    if batch_dims:
        same = (params.kind, params.axis, params.layout) == (indices.kind, indices.axis, indices.layout)
        return params if same and params.kind is Holds.APART and params.axis < batch_dims else None
    if params.kind is Holds.CONSTANT and indices.kind is Holds.APART:
        return replace(indices, axis=axis + indices.axis)
    if params.kind is not Holds.APART:
        return None
    if indices.kind is Holds.CONSTANT and params.axis != axis:
        return replace(params, axis=params.axis + (places.shape.rank - 1 if params.axis > axis else 0))
    first = params.axis == axis and indices.axis == 0 and places.shape.rank == 1
    chosen = first and indices.kind is Holds.PLACES and indices.base == params.layout
    return replace(indices, kind=Holds.APART, axis=axis, base=None) if chosen else None


def _picked_entries(shape: Origin, places: tf.Tensor, source: tf.Tensor) -> Origin | None:
    chosen = tf.get_static_value(places)
    if chosen is None or shape.axis < 0 or source.shape[0] is None:
        return None
    entries = [int(place) % source.shape[0] for place in chosen.reshape(-1)]
    if places.shape.rank == 0:
        return _entry(shape, entries[0])
    return replace(shape, axis=entries.index(shape.axis)) if shape.axis in entries else CONSTANT


def _gathered_nd(tensor: tf.Tensor, found: _Found) -> Origin | None:
    params, indices = found[:2]
    if indices.axis >= tensor.op.inputs[1].shape.rank - 1:
        return None
    if indices.kind is Holds.APART and params.kind is Holds.CONSTANT:
        return indices
    chosen = indices.kind is Holds.PLACES and params.kind is Holds.APART and params.axis == 0
    return replace(indices, kind=Holds.APART, base=None) if chosen and indices.base == params.layout else None


def _product_of_matrices(tensor: tf.Tensor, found: _Found) -> Origin | None:
    operation = tensor.op
    names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    turned = [operation.get_attr(name) for name in names]
    ranks = [part.shape.rank for part in operation.inputs]
    if None in ranks:
        return None
    out = tensor.shape.rank
    summed, kept = [], []
    for place, (origin, rank, turn) in enumerate(zip(found, ranks, turned, strict=True)):
        if origin.kind is Holds.CONSTANT:
            continue
        if origin.kind is not Holds.APART:
            return None
        behind = rank - origin.axis
        if behind > 2:
            kept.append((out - behind, origin))
        elif behind == (1 if (place == 0) != turn else 2):  # the axis that the product sums over
            summed.append(origin)
        else:
            kept.append((out - (2 if place == 0 else 1), origin))
    return _of_product(summed, kept)


def _of_product(summed: Sequence[Origin], kept: Sequence[tuple[int, Origin]]) -> Origin | None:
    if kept and not summed:
        places = {(axis, origin.layout) for axis, origin in kept}
        return replace(kept[0][1], axis=kept[0][0]) if len(places) == 1 else None
    same = len(summed) == 2 and summed[0].layout == summed[1].layout
    return _TOTAL if same and not kept else None


def _einsum(tensor: tf.Tensor, found: _Found) -> Origin | None:
    given, result = tensor.op.get_attr("equation").decode().replace(" ", "").split("->")
    wide = max((source.shape.rank or 0) for source in tensor.op.inputs)
    spare = [letter for letter in string.ascii_letters if letter not in given][:wide]
    labels = []
    for part, source in zip(given.split(","), tensor.op.inputs, strict=True):
        if source.shape.rank is None:
            return None
        dots = source.shape.rank - len(part.replace("...", "")) if "..." in part else 0
        labels.append(part.replace("...", "".join(spare[len(spare) - dots :])))
    dots = tensor.shape.rank - len(result.replace("...", "")) if "..." in result else 0
    result = result.replace("...", "".join(spare[len(spare) - dots :]))
    dependent = [pair for pair in zip(labels, found, strict=True) if pair[1].kind is not Holds.CONSTANT]
    constant = [label for label, origin in zip(labels, found, strict=True) if origin.kind is Holds.CONSTANT]
    if any(origin.kind is not Holds.APART for _, origin in dependent):
        return None
    records = {(label[origin.axis], origin.layout) for label, origin in dependent}
    (record, _), origin = next(iter(records)), dependent[0][1]
    if len(records) != 1 or any(record in label for label in constant):
        return None
    return replace(origin, axis=result.index(record)) if record in result else _TOTAL


def _summed_by_key(tensor: tf.Tensor, found: _Found) -> Origin | None:
    """Sums of records' values by their own keys, of which there are always as many."""
    *by_record, size = found
    kinds = {origin.kind for origin in by_record} - {Holds.CONSTANT}
    layouts = {(origin.axis, origin.layout) for origin in by_record if origin.kind is not Holds.CONSTANT}
    return _TOTAL if kinds == {Holds.APART} and len(layouts) == 1 and size.kind is Holds.CONSTANT else None


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_ALONG_LAST, _along_last),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_AXES_NAMED, _along_named),
    **dict.fromkeys(("Shape", "ShapeN", "Size", "Rank"), _shape),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _product_of_matrices),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _padded),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _gathered),
    **dict.fromkeys(("GatherNd", "ResourceGatherNd"), _gathered_nd),
    "IdentityN": lambda tensor, found: found[tensor.value_index],
    "Pack": _stacked,
    "Unpack": _unstacked,
    "ConcatV2": _joined,
    "StridedSlice": _sliced,
    "Slice": _cut,
    "Reshape": _reshaped,
    "ExpandDims": _expanded,
    "Squeeze": _squeezed,
    "Transpose": _transposed,
    "Tile": _tiled,
    "BroadcastTo": _broadcast,
    "Fill": _filled,
    "Range": _counted_up,
    "OneHot": _one_hot,
    "Where": _where,
    "DynamicPartition": _partitioned,
    "Einsum": _einsum,
    "UnsortedSegmentSum": _summed_by_key,
    "ScatterNd": _summed_by_key,
}
