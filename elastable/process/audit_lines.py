"""The audit log of a command's server, on stderr where nobody has set up logging."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

__all__ = ["show_audit_log"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what is `sys.stderr` at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Where lines go."""
        return sys.stderr


def show_audit_log() -> None:
    """Has `elastable.audit` written to stderr, unless loggers of this process have handlers already."""
    log = logging.getLogger("elastable.audit")
    if log.hasHandlers():
        return
    handler = _Stderr()
    handler.setFormatter(logging.Formatter(_FORMAT))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
