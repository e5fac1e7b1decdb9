"""What is looked up, and into which memory: ids or bags of ids, checked against their table."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64, aligned
from elastable.embedding_store.contract.row_source import LookupRequest
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadIds, BadInput, SpecConflict
from elastable.embedding_store.native.row_fold import COMBINERS
from elastable.embedding_store.tables.checks import array_kind, as_ids, require_id_array


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """Ids in bags, each of which is looked up as one row.

    Attributes:
        ids: Integers `[n, bag]`: n bags of equal size; or `[m]` with offsets.
        combiner: "sum", "mean" (divided by the number of ids, or the sum of their weights) or "sqrtn" (divided by the
            root of the number, or of the sum of the squared weights).
        offsets: Integers `[n + 1]`, ascending from 0 to m, as in CSR: bag b is `ids[offsets[b]:offsets[b + 1]]`.
            (PyTorch's `EmbeddingBag` means the same with `include_last_offset=True`.)
        weights: float32, of the ids' shape: multiplies each id's row.
    """

    ids: npt.ArrayLike
    combiner: str = "sum"
    offsets: npt.ArrayLike | None = None
    weights: npt.ArrayLike | None = None


def lookup_request(
    spec: TableSpec, wanted: npt.ArrayLike | Bags, out: Float32 | None = None, *, of_wider: bool = False
) -> LookupRequest:
    """The request for ids or bags of a table, and its output where none is given.

    Args:
        spec: The table.
        wanted: Integers of any shape, each looked up as a row; or bags.
        out: float32, ids' shape + `[dim]` or `[bags, dim]`, C-contiguous.
        of_wider: `out` may be columns of a wider C-contiguous buffer.

    Raises:
        BadIds: ids or offsets that cannot be, named.
        BadInput: combiner, weights or `out` that cannot be, named.
    """
    if not isinstance(wanted, Bags):
        ids = as_ids(wanted, spec.name)
        flat, shape = np.ascontiguousarray(ids).reshape(-1), (*ids.shape, spec.dim)
        if out is None:
            return LookupRequest(spec.name, flat, np.empty((len(flat), spec.dim), np.float32))
        out = _output(spec, shape, out, of_wider)
        return _apart(LookupRequest(spec.name, flat, out.reshape(-1, spec.dim)))
    if wanted.combiner not in COMBINERS:
        raise BadInput(f"table {spec.name!r}: combiner {wanted.combiner!r}; known combiners are {', '.join(COMBINERS)}")
    ids = as_ids(wanted.ids, spec.name)
    offsets = _offsets(spec, ids, wanted.offsets)
    weights = _weights(spec, ids, wanted.weights)
    out = _output(spec, (len(offsets) - 1, spec.dim), out, of_wider)
    flat = np.ascontiguousarray(ids).reshape(-1)
    return _apart(LookupRequest(spec.name, flat, out, offsets, weights, wanted.combiner))


def rows_request(spec: TableSpec, ids: Int64) -> LookupRequest:
    """The request for a row of each of `ids` int64 `[n]`, into new memory.

    Raises:
        BadIds: another dtype or shape.
    """
    ids = require_id_array(spec, ids)
    return LookupRequest(spec.name, ids, aligned((len(ids), spec.dim), np.float32))


def require_width(request: LookupRequest, dim: int) -> None:
    """Raises `SpecConflict` unless the request was made for rows of `dim` values, as its table has now."""
    if request.out.shape[1] != dim:
        raise SpecConflict(
            f"table {request.table!r} has rows of {dim} values now, and {request.out.shape[1]} are asked for: it was "
            "dropped and made anew with another spec; make a new view of it"
        )


def _offsets(spec: TableSpec, ids: Int64, given: npt.ArrayLike | None) -> Int64:
    where = f"table {spec.name!r}"
    if given is None:
        if ids.ndim != 2:
            raise BadIds(
                f"{where}: a combiner needs bags, ids [n, bag] or ids [m] with offsets [n + 1]; "
                f"got ids {list(ids.shape)} without offsets"
            )
        ends: Int64 = np.arange(len(ids) + 1) * ids.shape[1]
        return ends
    if ids.ndim != 1:
        raise BadIds(f"{where}: with offsets ids must be [m], got {list(ids.shape)}")
    numbers = _array(spec, "offsets", given, None)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or not len(numbers):
        raise BadIds(f"{where}: offsets must be integers [n + 1], got {numbers.dtype} {list(numbers.shape)}")
    offsets: Int64 = np.ascontiguousarray(numbers, np.int64)
    if offsets[0] != 0:
        raise BadIds(f"{where}: offsets must begin with 0, got offsets[0] = {offsets[0]}")
    descending = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(descending):
        k = int(descending[0])
        raise BadIds(
            f"{where}: offsets must ascend, got offsets[{k + 1}] = {offsets[k + 1]} after offsets[{k}] = {offsets[k]}"
        )
    if offsets[-1] != len(ids):
        raise BadIds(
            f"{where}: offsets must end with the number of ids, {len(ids)}; got offsets[{len(offsets) - 1}] = "
            f"{offsets[-1]} (one more offset than bags, as in CSR)"
        )
    return offsets


def _array(spec: TableSpec, what: str, given: npt.ArrayLike, dtype: type[np.float32] | None) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(given, dtype)
    except (ValueError, TypeError) as error:  # lists of different lengths, or of no numbers
        raise BadIds(f"table {spec.name!r}: {what} must be numbers of one shape: {error}") from error


def _weights(spec: TableSpec, ids: Int64, given: npt.ArrayLike | None) -> Float32 | None:
    if given is None:
        return None
    weights = given if isinstance(given, np.ndarray) else _array(spec, "weights", given, np.float32)
    if weights.dtype != np.float32 or weights.shape != ids.shape:
        raise BadInput(
            f"table {spec.name!r}: weights must be float32 {list(ids.shape)}, as the ids are; "
            f"got {weights.dtype} {list(weights.shape)}"
        )
    return np.ascontiguousarray(weights).reshape(-1)


def _output(spec: TableSpec, shape: tuple[int, ...], out: object, of_wider: bool) -> Float32:
    if out is None:
        return np.empty(shape, np.float32)
    where = f"table {spec.name!r}: out"
    if not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != shape:
        raise BadInput(f"{where} must be float32 {list(shape)}, got {array_kind(out)}")
    if not out.flags.writeable:
        raise BadInput(f"{where} is read-only")
    if not of_wider and not out.flags.c_contiguous:
        raise BadInput(f"{where} must be C-contiguous, got strides {list(out.strides)}")
    return out


def _apart(request: LookupRequest) -> LookupRequest:
    for name in ("ids", "offsets", "weights"):
        given = getattr(request, name)
        if given is not None and np.may_share_memory(given, request.out):
            raise BadInput(f"table {request.table!r}: out overlaps the {name}")
    return request
