"""Kernels whose sums may be taken in any order, so that they fill the processor's lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["inlined_freely", "summing_kernel"]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "nsz", "contract"}}


def summing_kernel(function: F) -> F:
    """Compiles `function` at its first call, or loads it from numba's cache.

    As `elastable.embedding_store.native.kernel.kernel`, but sums are folded in as many lanes as
    the processor has (NaN and Inf stay what they are). The fold of one pair of
    vectors does not depend on which others are scored in the call, so a pair
    has the same score to the bit wherever it is scored, on machines of one
    kind; other processors may differ in the last bit, as with any BLAS.
    """
    try:
        compiled: F = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder for the cache can be written
        compiled = numba.njit(**_OPTIONS)(function)
    return compiled


def inlined_freely(function: F) -> F:
    """A function that becomes part of each kernel of its own file that calls it."""
    inside: F = numba.njit(inline="always", **_OPTIONS)(function)
    return inside
