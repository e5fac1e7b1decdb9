"""Many readers or one writer, with deadlines."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from elastable.embedding_store.errors import DeadlineExceeded


class ReadersWriterLock(AbstractContextManager[None]):
    """Readers share, a writer excludes all. A waiting writer goes before new readers.

    Not reentrant: a holder that asks again may wait for itself.
    """

    def __init__(self, timeout_s: float, name: str) -> None:
        """`timeout_s`: seconds that anyone waits at most; `name`: of what is guarded, for errors."""
        self._changed = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0
        self._timeout_s = timeout_s
        self._name = name

    def reading(self) -> AbstractContextManager[None]:
        """Holds the lock together with other readers.

        Raises:
            DeadlineExceeded: a writer held it for the whole timeout.
        """
        return self  # making a generator takes as long as a lookup of one row

    def __enter__(self) -> None:
        with self._changed:
            if self._writing or self._writers_waiting:
                self._wait(lambda: not self._writing and not self._writers_waiting, "read")
            self._readers += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._readers -= 1
            if not self._readers:
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the lock alone.

        Raises:
            DeadlineExceeded: others held it for the whole timeout.
        """
        with self._changed:
            self._writers_waiting += 1
            try:
                if self._writing or self._readers:
                    self._wait(lambda: not self._writing and not self._readers, "write")
                self._writing = True
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def wait_until(self, true: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `true()` comes true within `timeout_s` seconds; it is asked whenever a holder is done."""
        with self._changed:
            return self._changed.wait_for(true, timeout_s)

    def _wait(self, ready: Callable[[], bool], wish: str) -> None:
        started = time.monotonic()
        if not self._changed.wait_for(ready, self._timeout_s):
            raise DeadlineExceeded(
                f"waited {time.monotonic() - started:.1f} s to {wish} {self._name}; the limit is {self._timeout_s} s"
            )
