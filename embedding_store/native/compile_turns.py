"""One process at a time compiles a kernel; the others wait, and load what it saved.

A master and its workers begin together on a fresh machine. Each would compile every kernel, all on the same cores.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from numba.core import event

__all__ = ["CompileTurns"]

_PATIENCE_S = 20.0  # for one kernel; whoever has it may have been stopped
_LOOK_S = 0.02


class CompileTurns:
    """The kernels that this process compiles now. Callers hold numba's compiler lock."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def take(self, lock: Path) -> None:
        """Waits until no other process compiles the kernel of this lock file, for 20 s at most; then it is our turn.

        Deadlines that pause while this process compiles (`compile_seconds`) pause here, too.
        """
        if lock in self._held:
            return  # it did not compile; this is another attempt
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return  # a disk that is full, say: every process compiles for itself
        self._held[lock] = file
        if _locked(file):
            return
        with event.trigger_event("numba:compile", data={"waits for": str(lock)}):
            give_up = time.monotonic() + _PATIENCE_S
            while time.monotonic() < give_up and not _locked(file):
                time.sleep(_LOOK_S)

    def give_back(self, lock: Path) -> None:
        """The kernel is saved, or cannot be: whoever waits looks for it."""
        file = self._held.pop(lock, None)
        if file is not None:
            # Whoever has opened the file already finds the kernel, and so does whoever makes a new one.
            lock.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: nobody can be waited for
    return True
