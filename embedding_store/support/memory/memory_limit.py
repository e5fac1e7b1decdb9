"""How much memory this process may use."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

__all__ = ["before_image_bytes_here", "direct_bytes_here", "memory_limit", "row_budget_here"]

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_LEAST_DIRECT = 1 << 30
_SHARE = 8
_BEFORE_IMAGES = 4
_LEAST_BUDGET = 1 << 30
_BUDGET = 4


@lru_cache(maxsize=1)
def memory_limit() -> int:
    """Bytes: the machine's memory, or less where a container may have less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        allowed = _CGROUP.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return machine
    return min(machine, int(allowed)) if allowed.isdecimal() else machine


def direct_bytes_here() -> int:
    """Bytes up to which a fixed table is laid out whole: an eighth of the memory, at least 1 GiB.

    Laid out whole a row is found without an index, but rows touched here and
    there take a page each: a few such tables must fit.
    """
    return max(_LEAST_DIRECT, memory_limit() // _SHARE)


def before_image_bytes_here() -> int:
    """Bytes that before-images of pinned versions may take where nothing else is said: a quarter of the memory."""
    return memory_limit() // _BEFORE_IMAGES


def row_budget_here() -> int:
    """Bytes for hot rows of tables with a tier where nothing else is said: a quarter of the memory, at least 1 GiB."""
    return max(_LEAST_BUDGET, memory_limit() // _BUDGET)
