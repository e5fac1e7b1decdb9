"""Pages of files that are written and not read again, given back to the system."""

from __future__ import annotations

import os
import sys

__all__ = ["forget_pages"]


def forget_pages(fd: int) -> None:
    """Takes what is on the disk of a file out of the page cache; what is not stays. Raises `OSError`.

    A log is read only when a store is opened again. Left in the page cache, it displaces what others read, and each
    entry is written to pages that nobody has used for long: in a virtual machine whose host takes free pages back,
    such pages take several times as long to write to as those that were in use a moment ago.
    """
    if sys.platform.startswith("linux"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
