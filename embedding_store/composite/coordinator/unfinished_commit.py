"""A commit that only some of several stores may have applied; no other commit is accepted until all of them have."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Self

import numpy as np

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.errors import StoreFailed

__all__ = ["UnfinishedCommit"]


@dataclass(frozen=True, slots=True)
class UnfinishedCommit:
    """Identifies a commit.

    Attributes:
        version: The version that it makes.
        digest: BLAKE2b of everything in the commit but its time, gradients and record included.
        time: Of the commit, which it keeps when it is repeated.
    """

    version: int
    digest: bytes
    time: float | None = None

    @classmethod
    def of(cls, commit: Commit) -> Self:
        """Identifies `commit`."""
        return cls(commit.version, _digest(commit), commit.time)

    def require_same(self, commit: Commit) -> None:
        """Raises `StoreFailed` unless `commit` is this commit."""
        if commit.version != self.version or _digest(commit) != self.digest:
            raise StoreFailed(
                f"the commit of version {self.version} broke off: repeat that very commit, with the same gradients, "
                "before another one, or restore rows and reset the version"
            )


def _digest(commit: Commit) -> bytes:
    fields = (commit.version, commit.step, sorted(commit.learning_rates.items()), commit.ends_chapter, commit.frozen)
    digest = hashlib.blake2b(repr(fields).encode())
    for name, update in commit.updates.items():
        digest.update(f"{name} {update.gradients.shape}".encode())
        for part in (update.ids, update.gradients, update.row_squares):
            if part is not None:
                digest.update(np.ascontiguousarray(part).data)
    if commit.record is not None:
        digest.update(commit.record)
    return digest.digest()
