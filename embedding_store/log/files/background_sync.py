"""Brings a log to the disk every now and then, while entries are appended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from elastable.embedding_store.log.files.forgotten_pages import forget_pages

__all__ = ["BackgroundSync"]

_MOST_BYTES = 8 << 20  # what a new segment has to wait for, and what the page cache holds


class BackgroundSync:
    """A thread that brings a file to the disk: at most an interval after an append, or after 8 MiB of them."""

    def __init__(self, interval_s: float, file: Callable[[], int], failed: Callable[[str], None]) -> None:
        """Begins.

        Args:
            interval_s: Seconds.
            file: Gives a duplicate of the file's descriptor, which is closed here; -1: there is no file.
            failed: Is told why the system could not write.
        """
        self._interval_s, self._file, self._failed = interval_s, file, failed
        self._bytes = 0
        self._appended, self._many = threading.Event(), threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="log-fsync", daemon=True)
        self._thread.start()

    def appended(self, count: int) -> None:
        """So many bytes more are in the file."""
        self._bytes += count
        if self._bytes > _MOST_BYTES:
            self._many.set()
        self._appended.set()

    def close(self) -> None:
        """Ends the thread. Closing twice is harmless."""
        self._closing = True
        self._many.set()
        self._appended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._appended.wait()
            self._many.wait(self._interval_s)
            if self._closing:
                return
            # Before the file is synced: what is appended from now on is announced again.
            self._appended.clear()
            self._many.clear()
            self._bytes = 0
            self._sync()

    def _sync(self) -> None:
        fd = self._file()
        if fd < 0:
            return
        try:
            os.fdatasync(fd)  # not under the log's guard: commits continue meanwhile
            forget_pages(fd)
        except OSError as error:
            self._failed(str(error.strerror))
        finally:
            os.close(fd)
