"""A pin renewed for as long as somebody reads there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from embedding_store.errors import ElastableError, StaleVersion
from embedding_store.pins import Pin

__all__ = ["kept"]

_log = logging.getLogger(__name__)


@contextmanager
def kept(pin: Pin, every_s: float) -> Iterator[Pin]:
    """Renews a pin every so many seconds within a block, and releases it at the end.

    A pin that is gone nevertheless is noticed by whoever reads there next.

    Args:
        pin: Taken over.
        every_s: A fraction of its lease, in seconds.
    """
    over = threading.Event()

    def renew() -> None:
        while not over.wait(every_s):
            try:
                pin.renew()
            except StaleVersion:
                return
            except ElastableError as error:
                # The store may answer again before the lease ends.
                _log.warning("a pin was not renewed: %s", error)

    keeper = threading.Thread(target=renew, name="elastable-pin-keeper", daemon=True)
    keeper.start()
    try:
        yield pin
    finally:
        over.set()
        keeper.join()
        try:
            pin.release()
        except ElastableError as error:
            _log.warning("a pin ends with its lease: %s", error)
