"""What a piece of work allocates of memory that Python and NumPy know of."""

import tracemalloc
from collections.abc import Callable


def least_peak(work: Callable[[], object]) -> int:
    """The most bytes that were held at once while it worked, at the least of five times.

    All threads of the process are seen, and one that another test has left may allocate meanwhile; but not every time.
    """
    peaks = []
    for _ in range(5):
        tracemalloc.start()
        try:
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)
