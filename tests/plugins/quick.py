"""`--quick`: no servers, no processes, none of the dearest modules.

A test that would start a process is left out if it is marked `process` or needs a server; else it fails, in other runs
too, if it is of those that `make test-fast` runs.
"""

import os
import subprocess
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import pytest

from tests.plugins.order import DEAREST, ROOT

#: Fixtures that start servers; a test that needs one need not be marked `process`.
SERVERS = frozenset({"server_binary", "redis_node", "valkey_node", "redis_cluster_nodes"})

#: Fixtures that need those, and that tests name in their parameters.
OF_SERVERS = frozenset({"redis_url", "redis_cluster_url", "redis_sentinel_url", "valkey_url"})


#: Where the tests lie that `make test-fast` runs, but for those that are left out (`FAST_TESTS` in the Makefile).
FAST = ("tests/embedding_store/", "tests/master/", "tests/test_")

_DEAREST = frozenset(ROOT / name for name in DEAREST)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start neither processes nor servers")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The dearest modules are not even imported."""
    return True if config.option.quick and collection_path in _DEAREST else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where nothing may be started, starting something is an error. (Imports may: `platform` asks `uname`.)"""
    if not item.config.option.quick and (_is_left_out(item) or not item.nodeid.startswith(FAST)):
        return (yield)
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in ((subprocess.Popen, "__init__"), (BaseProcess, "start"), (os, "fork")):
            patched.setattr(owner, name, _refuse)
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.quick:
        return
    left = [item for item in items if _is_left_out(item)]
    items[:] = [item for item in items if not _is_left_out(item)]
    config.hook.pytest_deselected(items=left)


def _refuse(*words: object, **_: object) -> NoReturn:
    raise AssertionError(f"a quick test starts a process {words[1:]}: mark it with pytest.mark.process")


def _is_left_out(item: pytest.Item) -> bool:
    marked = any(item.get_closest_marker(name) for name in ("process", "slow"))
    callspec = getattr(item, "callspec", None)
    named = {value for value in callspec.params.values() if isinstance(value, str)} if callspec is not None else set()
    needs = not SERVERS.isdisjoint(getattr(item, "fixturenames", ())) or not OF_SERVERS.isdisjoint(named)
    return marked or item.nodeid.split("::")[0] in DEAREST or needs
