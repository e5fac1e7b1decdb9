"""Whose processes may share memory with this one: by default those of the same user."""

from __future__ import annotations

import os
import socket
import struct

from elastable.embedding_store.errors import BadInput

__all__ = ["USERS_VARIABLE", "other_users", "require_known_user"]

USERS_VARIABLE = "ELASTABLE_SHARE_WITH_USERS"
"""Numbers of other users, with commas between them, whose processes may attach and be attached."""

_ROOT = 0  # who reads this process' memory anyhow
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid


def other_users() -> frozenset[int]:
    """The users of the environment.

    Raises:
        BadInput: what stands there is no list of user numbers.
    """
    given = os.environ.get(USERS_VARIABLE, "").strip()
    if not given:
        return frozenset()
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
        raise BadInput(f"{USERS_VARIABLE}={given!r}: write numbers of users, as `id -u` says them, with commas between")
    return frozenset(int(part) for part in parts)


def require_known_user(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket.

    Raises:
        PermissionError: it is neither this one's, nor root, nor one of `other_users`.
        OSError: the system does not say.
    """
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    ours = os.geteuid()
    if user not in (ours, _ROOT) and user not in other_users():
        raise PermissionError(
            f"the process at the other end is of user {user}, this one of {ours}; "
            f"{USERS_VARIABLE}={user} would let them share memory"
        )
    return int(user)
