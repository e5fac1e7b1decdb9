"""The log of a process is left as a test found it: commands that run within a test set it up.

A test is shown what its own module logs. Threads that an earlier one left behind may have more to say (that a server
is away, say), and a test that counts lines would count theirs.
"""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

import pytest

_LOGGERS = [logging.getLogger(name) for name in ("elastable", "elastable.audit", "opentelemetry")]
_log_record = logging.Logger.handle
_earlier = WeakSet[threading.Thread]()
"""Threads that were there before the module whose tests run."""
_module: list[Path] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _module != [item.path]:
        _module[:] = [item.path]
        _earlier.update(thread for thread in threading.enumerate() if thread is not threading.main_thread())


def _handle(log: logging.Logger, record: logging.LogRecord) -> None:
    if threading.current_thread() not in _earlier:
        _log_record(log, record)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    before = [(list(log.handlers), log.level, log.propagate) for log in _LOGGERS]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(logging.Logger, "handle", _handle)
        yield
    for log, (handlers, level, propagate) in zip(_LOGGERS, before, strict=True):
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)
