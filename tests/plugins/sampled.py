"""Cases of expensive tests: `make test` takes some of them, `make test-slow` all.

A test marked `sampled(n)` keeps its first case and every n-th one after it; the others are marked `slow`. Meant for
combinations of which each alone would notice what breaks the others, not for cases that are the only ones of their
kind.

Without a `redis-server` the cases on Redis run on Valkey. Those on Valkey would repeat them, and are `slow` as well.
"""

from collections import Counter

import pytest

from tests.servers import redis_binary

_ON_VALKEY = frozenset({"valkey", "valkey_node", "valkey_url"})


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    repeat = redis_binary() is None
    for item in items:
        if repeat and _is_on_valkey(item):
            item.add_marker(pytest.mark.slow)
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        (every,) = mark.args
        test = item.nodeid.partition("[")[0]
        if seen[test] % every:
            item.add_marker(pytest.mark.slow)
        seen[test] += 1


def _is_on_valkey(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return any(isinstance(value, str) and value in _ON_VALKEY for value in parameters.values())
