"""The way back of a lookup: the gradient of rows, given the gradient of what was looked up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.rows.checks import require_gradients
from elastable.embedding_store.tables.lookup_request import Bags, LookupRequest, lookup_request
from elastable.embedding_store.tables.table_update import IndexedSlices

__all__ = ["lookup_gradient"]


def lookup_gradient(spec: TableSpec, wanted: npt.ArrayLike | Bags, gradient: npt.ArrayLike) -> IndexedSlices:
    """The gradient of a table's rows, by occurrence; see `EmbeddingTable.lookup_gradient`.

    Args:
        spec: The table.
        wanted: What was looked up: integers of any shape, or bags.
        gradient: float32, of the shape that the lookup returned.

    Raises:
        BadGradient: another dtype or shape.
        BadIds, BadInput: ids or bags that cannot be, as the lookup says.
    """
    request = lookup_request(spec, wanted)
    given = np.asarray(gradient)
    if not isinstance(wanted, Bags) and given.ndim:
        given = given.reshape(-1, given.shape[-1]) if given.size else np.empty((0, spec.dim), given.dtype)
    upstream = require_gradients(spec, len(request.out) if request.offsets is not None else len(request.ids), given)
    if request.offsets is None:
        return IndexedSlices(upstream, request.ids)
    divisors = _divisors(request)
    if divisors is not None:
        known = divisors != 0  # else the bag is zeros, whatever its rows are
        upstream = np.divide(upstream, divisors[:, None], out=np.zeros_like(upstream), where=known[:, None])
    values: Float32 = np.repeat(upstream, np.diff(request.offsets), axis=0)
    if request.weights is not None:
        values *= request.weights[:, None]
    return IndexedSlices(values, request.ids)


def _divisors(request: LookupRequest) -> Float32 | None:
    """float32 `[bags]`: what the sum of each bag is divided by; None: by nothing."""
    if request.combiner == "sum" or request.offsets is None:
        return None
    sizes = np.diff(request.offsets)
    totals: Float32 = sizes.astype(np.float32)
    if request.weights is not None:
        terms = request.weights if request.combiner == "mean" else np.square(request.weights)
        full = sizes > 0
        totals = np.zeros(len(sizes), np.float32)
        if full.any():
            totals[full] = np.add.reduceat(terms, request.offsets[:-1][full])
    return totals if request.combiner == "mean" else np.sqrt(totals)
