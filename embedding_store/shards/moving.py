"""What a store server keeps in the place of a version's record while its rows are moved to other servers, and after."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.errors import BadInput, StoreBroken

__all__ = ["Move", "refuse_moved"]

_MARK = b"elastable: rows of a job are moved\n"
_MOST_ADDRESSES = 10_000


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of a job on their way from some store servers to others.

    Attributes:
        old: Addresses of the servers that had them, in order.
        new: Addresses of those that get them.
        gone: True at an old server: its rows are at the new ones. False at a new one: they may be there in part.
        record: Of the version, which the new server keeps for when it is its turn.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    gone: bool
    record: bytes | None = None

    def to_bytes(self) -> bytes:
        """As a record of a version."""
        fields = {"old": self.old, "new": self.new, "gone": self.gone, "record": self.record is not None}
        return _MARK + json.dumps(fields).encode() + b"\n" + (self.record or b"")

    @classmethod
    def from_bytes(cls, record: bytes | None) -> Self | None:
        """What `to_bytes` gave; None for the record of a version. Raises `StoreBroken`: it is malformed."""
        if record is None or not record.startswith(_MARK):
            return None
        text, _, rest = record.removeprefix(_MARK).partition(b"\n")
        try:
            fields = json.loads(text)
            old, new = (tuple(map(str, fields[name])) for name in ("old", "new"))
            if not 0 < max(len(old), len(new)) <= _MOST_ADDRESSES:
                raise ValueError(f"{len(old)} and {len(new)} addresses")
            return cls(old, new, bool(fields["gone"]), rest if fields["record"] else None)
        except MALFORMED as error:
            raise StoreBroken(f"what the store server says about where its rows went is malformed: {error}") from error

    @property
    def command(self) -> str:
        """What moves the rows."""
        return f"elastable store rescale --from {','.join(self.old)} --to {','.join(self.new)}"


def refuse_moved(address: str, record: bytes | None) -> None:
    """Raises `BadInput` where a store server is none of a job any more, or not yet; it says what to write instead."""
    move = Move.from_bytes(record)
    if move is None:
        return
    if move.gone:
        raise BadInput(
            f"the rows of store server {address} have moved: write --stores {','.join(move.new)} instead of "
            f"--stores {','.join(move.old)}"
        )
    raise BadInput(
        f"store server {address} does not have all rows yet, as moving them broke off: end it with `{move.command}`, "
        f"or go on where they were, with --stores {','.join(move.old)}"
    )
