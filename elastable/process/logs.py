"""Logging of the `elastable` command: to stderr, as text or JSON, without secrets, and each thing only so often."""

import logging
import re
import sys
import time
from typing import TextIO

from elastable.embedding_store.support.extras import needs

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS = ("job", "role", "worker", "version", "shard")
_OFTEN, _WINDOW_S = 5, 60.0  # lines that differ in their values alone
_MOST_KINDS = 1_024
_LOGIN = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@")

_process: dict[str, object] = {}
_now = time.monotonic


def describe_process(**fields: object) -> None:
    """Says what the process is, for every later line in JSON: `job`, `role`, `worker`, `version`, `shard`."""
    _process.update(fields)


def set_up_logging(level: str, form: str) -> None:
    """Writes the log of Elastable to stderr; the audit log is written whatever the level is.

    Args:
        level: One of `LEVELS`.
        form: One of `FORMATS`.

    Raises:
        NotInstalled: JSON, and the extra "monitoring" is not installed.
    """
    handler = _Stderr()
    handler.addFilter(_Rarely())
    handler.addFilter(_describe)
    handler.setFormatter(_json_formatter() if form == "json" else logging.Formatter(_TEXT))
    for name in ("elastable", "opentelemetry"):  # which says where spans are not exported
        log = logging.getLogger(name)
        for earlier in [each for each in log.handlers if isinstance(each, _Stderr)]:
            log.removeHandler(earlier)
        log.addHandler(handler)
        log.setLevel(level.upper() if name == "elastable" else logging.WARNING)
        log.propagate = False
    logging.getLogger("elastable.audit").setLevel(logging.INFO)


def _json_formatter() -> logging.Formatter:
    with needs("--log-format json", "monitoring"):
        from pythonjsonlogger.json import JsonFormatter

    names = {"levelname": "level", "name": "logger"}
    return JsonFormatter("%(levelname)s %(name)s %(message)s", rename_fields=names, timestamp="time")


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what is `sys.stderr` at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Where lines go."""
        return sys.stderr


def _describe(record: logging.LogRecord) -> bool:
    """Adds what the process is, and takes logins out of addresses."""
    message = record.getMessage()
    if "@" in message:
        record.msg, record.args = _LOGIN.sub(r"\1***@", message), ()
    for name in _FIELDS:
        if name in _process and not hasattr(record, name):
            setattr(record, name, _process[name])
    return True


class _Rarely(logging.Filter):
    """Lets a kind of line through five times a minute; the next one says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Called with the handler's lock; audit lines have a bound of their own."""
        if record.name == "elastable.audit":
            return True
        kind, now = (record.name, str(record.msg)), _now()
        begun, count = self._kinds.get(kind, (now, 0))
        left_out = 0
        if now - begun >= _WINDOW_S:
            left_out, begun, count = max(0, count - _OFTEN), now, 0
        if len(self._kinds) >= _MOST_KINDS and kind not in self._kinds:
            self._kinds.clear()
        self._kinds[kind] = begun, count + 1
        if count >= _OFTEN:
            return False
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like it are not in this log)", ()
        return True
