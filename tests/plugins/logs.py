"""The log of a process is left as a test found it: commands that run within a test set it up."""

import logging
from collections.abc import Iterator

import pytest

_LOGGERS = [logging.getLogger(name) for name in ("elastable", "elastable.audit", "opentelemetry")]


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    before = [(list(log.handlers), log.level, log.propagate) for log in _LOGGERS]
    yield
    for log, (handlers, level, propagate) in zip(_LOGGERS, before, strict=True):
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)
