"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Returns once the condition is true; fails where it is not within `limit_s`, which is for broken code alone."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not so within {limit_s} s"
        time.sleep(0.01)
