"""Pushes of the version in work, by micro-batch, in bounded memory. Not thread-safe: `Shard` guards it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastable.embedding_store.errors import NotReady
from elastable.embedding_store.shards.row_pushes import RowPush, Slices

__all__ = ["PushBuffer"]

_PUSH_BYTES = 1 << 10  # of a push without rows: what names it takes memory, too


class PushBuffer:
    """Keeps pushes of one version: those of an earlier one go when the first of a later one comes.

    Args:
        most_bytes: Of arrays; what would not fit is refused.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._version = -1
        self._pushes: dict[int, RowPush] = {}
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Of what is kept."""
        return self._bytes

    def holds(self, push: RowPush) -> bool:
        """Whether a push of that name is here."""
        return push.version == self._version and push.micro_batch in self._pushes

    def add(self, push: RowPush) -> None:
        """Keeps a push that is not here. Raises `NotReady` where there is no room for it now."""
        size = _PUSH_BYTES + sum(
            each.indices.nbytes + each.values.nbytes for part in push.parts for each in part.values()
        )
        held = self._bytes if push.version == self._version else 0
        if held + size > self._most_bytes:
            raise NotReady(
                f"the store server holds {held:,} bytes of gradients of version {push.version}, and {size:,} more are "
                f"above its limit of {self._most_bytes:,}: give it more with --gradient-bytes, or let fewer "
                "micro-batches make a version (--grads-to-wait)"
            )
        if push.version != self._version:
            self._version, self._pushes, self._bytes = push.version, {}, 0
        self._pushes[push.micro_batch] = push
        self._bytes += size

    def missing(self, version: int, micro_batches: Iterable[int]) -> tuple[int, ...]:
        """Those of the micro-batches, each once, whose pushes on `version` are not here."""
        there = self._pushes if version == self._version else {}
        return tuple(number for number in dict.fromkeys(micro_batches) if number not in there)

    def parts(self) -> Mapping[int, Sequence[Mapping[str, Slices]]]:
        """The parts of every push, by micro-batch."""
        return {number: push.parts for number, push in self._pushes.items()}

    def clear(self) -> None:
        """Forgets everything."""
        self._version, self._pushes, self._bytes = -1, {}, 0
