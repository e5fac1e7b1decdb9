"""A pool whose only helper is busy elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elastable.embedding_store.native.range_pool import RangePool

_WAIT_S = 60.0


@contextmanager
def busy_pool() -> Iterator[RangePool]:
    """A pool of two threads, one of which does something else for as long as the block lasts."""
    pool, leave, inside = RangePool(2), threading.Event(), threading.Event()

    def hold(start: int, stop: int) -> None:
        if start == 1:  # in the pool's only thread
            inside.set()
            assert leave.wait(_WAIT_S)
        else:
            assert inside.wait(_WAIT_S)

    busy = threading.Thread(target=pool.run, args=(hold, 2, 1))
    busy.start()
    assert inside.wait(_WAIT_S)
    try:
        yield pool
    finally:
        leave.set()
        busy.join(_WAIT_S)
        pool.close()
    assert not busy.is_alive()
