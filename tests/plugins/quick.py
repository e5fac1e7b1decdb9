"""`--quick`: no servers and no processes. What would start one is left out if it says so, else fails."""

from __future__ import annotations

import subprocess
from typing import Any, NoReturn

import pytest

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

#: Fixtures that start servers; a test that needs one need not be marked `process`.
SERVERS = frozenset({"server_binary", "redis_node", "valkey_node", "redis_cluster_nodes"})


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--quick`."""
    parser.addoption("--quick", action="store_true", help="only tests that start neither processes nor servers")


def pytest_configure(config: pytest.Config) -> None:
    """Where nothing may be started, starting something is an error."""
    if config.option.quick:

        def refuse(self: Any, words: Any, *_: Any, **__: Any) -> NoReturn:
            raise AssertionError(f"a quick test starts {words}: mark it with pytest.mark.process")

        plain = subprocess.Popen.__init__
        subprocess.Popen.__init__ = refuse  # type: ignore[assignment, method-assign]
        config.add_cleanup(lambda: setattr(subprocess.Popen, "__init__", plain))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what starts processes or is slow."""
    if not config.option.quick:
        return
    left = [item for item in items if _starts_something(item)]
    items[:] = [item for item in items if not _starts_something(item)]
    config.hook.pytest_deselected(items=left)


def _starts_something(item: pytest.Item) -> bool:
    marked = any(item.get_closest_marker(name) for name in ("process", "slow"))
    return marked or not SERVERS.isdisjoint(getattr(item, "fixturenames", ()))
