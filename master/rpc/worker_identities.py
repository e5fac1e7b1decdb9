"""Authenticates workers: every worker's name belongs to the secret that it joined with."""

import hashlib
import threading
from collections.abc import Callable

from elastable.embedding_store.errors import BadInput, NotJoined, PermissionDenied
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Proof

_KEY = PROOF_KEYS[Proof.SESSION]
_LENGTHS = range(16, 65)  # bytes of a secret
_MOST = 8_192  # names that are remembered beyond their sessions
_LONGEST_NAME = 256  # bytes


class Identities:
    """The names of workers (incarnations) and the secrets that they joined with. Safe to use from many threads.

    Secrets are kept and compared as their SHA-256, so how long a comparison takes tells nothing about one.

    Args:
        there: Whether a worker of that name has a session now; such names are never forgotten.
    """

    def __init__(self, there: Callable[[str], bool] = lambda name: False) -> None:
        self._there = there
        self._lock = threading.Lock()
        self._owner: dict[str, bytes] = {}  # name -> what its secret hashes to; the latest to join last
        self._names: dict[bytes, int] = {}  # such a hash -> how many names it has

    def claim(self, name: str, secret: bytes) -> None:
        """For `Join`: the name is that of whoever shows the secret of this call, from now on.

        Raises:
            BadInput: the call shows no secret, or one that cannot be.
            PermissionDenied: the name is another's.
        """
        if len(secret) not in _LENGTHS:
            raise BadInput(f"Join: show one secret, of 16 to 64 random bytes, as metadata {_KEY}, here and later")
        shown = _hashed(secret)
        with self._lock:
            self._require_own(name, shown)
            self._bind(name, shown)

    def require(self, secret: bytes, name: str = "") -> None:
        """Returns where whoever has joined with the secret of a call has that name; "": any.

        Raises:
            BadInput: the name is longer than any.
            PermissionDenied: it is another's.
            NotJoined: nobody has joined with that secret, or under that name.
        """
        if (shown := _hashed(secret)) not in self._names:
            raise NotJoined(f"nobody has joined here with the secret of this call ({_KEY}): Join, or join again")
        if not name:
            return
        if len(name.encode()) > _LONGEST_NAME:
            raise BadInput(f"an incarnation of {len(name.encode())} bytes; the most are {_LONGEST_NAME}")
        with self._lock:
            self._require_own(name, shown)
            if name not in self._owner:
                raise NotJoined(f"worker {name!r} has not joined here")

    def _require_own(self, name: str, shown: bytes) -> None:
        if self._owner.get(name, shown) != shown:
            raise PermissionDenied(f"worker {name!r} is another session's: it joined with another secret")

    def _bind(self, name: str, shown: bytes) -> None:
        if self._owner.pop(name, None) is None:
            self._names[shown] = self._names.get(shown, 0) + 1
        self._owner[name] = shown
        while len(self._owner) > _MOST:
            oldest = next((known for known in self._owner if not self._there(known)), None)
            if oldest is None:
                return
            hashed = self._owner.pop(oldest)
            self._names[hashed] -= 1
            if not self._names[hashed]:
                del self._names[hashed]


def _hashed(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
