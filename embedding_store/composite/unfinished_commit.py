"""A commit that may stand in some of several stores: until it stands in all of them, no other commit is accepted."""

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
    """Which commit it was.

    Attributes:
        version: The version that it makes.
        digest: BLAKE2b of everything that the commit says, gradients and record included.
    """

    version: int
    digest: bytes

    @classmethod
    def of(cls, commit: Commit) -> Self:
        """Describes a commit."""
        return cls(commit.version, _digest(commit))

    def require_same(self, commit: Commit) -> None:
        """Raises `StoreFailed` unless `commit` is this very commit."""
        if commit.version != self.version or _digest(commit) != self.digest:
            raise StoreFailed(
                f"the commit of version {self.version} broke off; before another one that very commit "
                "has to be repeated, with the same gradients, or rows restored and the version reset"
            )


def _digest(commit: Commit) -> bytes:
    said = (commit.version, commit.step, sorted(commit.learning_rates.items()), commit.ends_chapter, commit.frozen)
    digest = hashlib.blake2b(repr(said).encode())
    for name, update in commit.updates.items():
        digest.update(f"{name} {update.gradients.shape}".encode())
        for part in (update.ids, update.gradients, update.row_squares):
            if part is not None:
                digest.update(np.ascontiguousarray(part).data)
    if commit.record is not None:
        digest.update(commit.record)
    return digest.digest()
