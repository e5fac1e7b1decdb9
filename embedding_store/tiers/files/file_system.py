"""What the file system of a file promises."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["overwrites_in_place"]

_EXT, _TMPFS = 0xEF53, 0x01021994
_WORDS = 64  # more than the system fills in


def overwrites_in_place(fd: int) -> bool:
    """Whether what is written to allocated blocks never needs others, so that it cannot meet a full disk.

    So it is with ext4 and tmpfs. XFS and Btrfs write shared blocks elsewhere, ZFS all of them, and what lies below an
    overlay is not known; of whatever else there is, the answer is False.
    """
    if not sys.platform.startswith("linux"):
        return False
    found = (ctypes.c_long * _WORDS)()
    if ctypes.CDLL(None).fstatfs(fd, found):
        return False
    return int(found[0]) in (_EXT, _TMPFS)
