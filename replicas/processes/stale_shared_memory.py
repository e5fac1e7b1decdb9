"""MPICH's shared-memory files, which it leaves behind when its processes are killed."""

import os
from collections.abc import Iterable
from contextlib import suppress

_MPICH_FILE = "/dev/shm/mpich_shm_"


def mapped_by(pid: int) -> set[str]:
    """MPICH's files that a process of this host maps; empty if the process has exited."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            return {_MPICH_FILE + line.split(_MPICH_FILE)[1].split()[0] for line in maps if _MPICH_FILE in line}
    except OSError:
        return set()


def remove_files(files: Iterable[str]) -> None:
    """Unlinks them: processes that map them keep them until they exit."""
    for file in files:
        with suppress(FileNotFoundError):
            os.unlink(file)
