"""What a piece of work allocates of memory that Python and NumPy know of."""

import tracemalloc
from collections.abc import Callable

_TIMES = 5


def least_peak(work: Callable[[], object]) -> int:
    """The most bytes that were held at once while it worked: the least of several times.

    All threads of the process are seen, and one that another test has left may allocate meanwhile; but not every time.
    """
    return min(_peak(work) for _ in range(_TIMES))


def _peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
