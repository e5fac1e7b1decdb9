"""Cases of expensive tests: `make test` takes some of them, `make test-slow` all.

A test marked `sampled(n)` keeps its first case and every n-th one after it; the others are marked `slow`. Meant for
combinations of which each alone would notice what breaks the others, not for cases that are the only ones of their
kind.
"""

from __future__ import annotations

from collections import Counter

import pytest

__all__ = ["pytest_collection_modifyitems"]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases that are left out."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        (every,) = mark.args
        test = item.nodeid.partition("[")[0]
        if seen[test] % every:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1
