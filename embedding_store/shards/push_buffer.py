"""Pushes that wait for their version, in bounded memory. Not thread-safe: `Shard` guards it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastable.embedding_store.errors import NotReady
from elastable.embedding_store.shards.row_pushes import RowPush, RowSums, Slices

__all__ = ["PushBuffer"]

_PUSH_BYTES = 1 << 10  # of a push without rows: what names it takes memory, too
_VERSIONS_KEPT = 16  # that an asynchronous push outlives, beyond those that the pushes before it may make

_Name = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Held:
    push: RowPush
    size: int
    since: int  # version of the store when it came


class PushBuffer:
    """Keeps synchronous pushes of one version, and the last asynchronous push of each sender.

    Synchronous pushes of an earlier version go when the first of a later one comes. An asynchronous push goes when its
    sender sends the next one: it waits for the answer to one push before it computes another. The last push of a sender
    that died, or whose push its master refused, goes when its room is needed, once the others that are here could all
    have been committed. A push that went too early is computed again: whoever sums asks for what is `missing`.

    Args:
        most_bytes: Of arrays; what would not fit is refused.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._version = -1  # of the synchronous pushes
        self._held: dict[_Name, _Held] = {}
        self._last: dict[str, int] = {}  # sequence of each sender's push that is here
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Of what is kept."""
        return self._bytes

    def holds(self, push: RowPush) -> bool:
        """Whether a push of that name is here."""
        return (push.sender != "" or push.version == self._version) and _name_of(push) in self._held

    def has_later(self, push: RowPush) -> bool:
        """Whether the sender of an asynchronous push has sent another one since."""
        return push.sender != "" and self._last.get(push.sender, push.micro_batch) > push.micro_batch

    def add(self, push: RowPush, version: int) -> None:
        """Keeps a push that is not here. Raises `NotReady` where there is no room for it now.

        Args:
            push: What to keep.
            version: Of the store.
        """
        rows = sum(each.indices.nbytes + each.values.nbytes for part in push.parts for each in part.values())
        size = _PUSH_BYTES + rows
        replaced = self._replaced_by(push)
        room = self._most_bytes - self._bytes + sum(self._held[name].size for name in replaced)
        if room < size:
            abandoned = self._abandoned(version, size - room, replaced)
            room += sum(self._held[name].size for name in abandoned)
            replaced += abandoned
        if room < size:
            raise NotReady(
                f"the store server holds {self._most_bytes - room:,} bytes of gradients that wait for version "
                f"{version + 1}, and {size:,} more are above its limit of {self._most_bytes:,}: give it more with "
                "--gradient-bytes, or let fewer micro-batches make a version (--grads-to-wait)"
            )
        self._drop(replaced)
        if push.sender:
            self._last[push.sender] = push.micro_batch
        else:
            self._version = push.version
        self._held[_name_of(push)] = _Held(push, size, version)
        self._bytes += size

    def _replaced_by(self, push: RowPush) -> list[_Name]:
        if push.sender:
            before = (push.sender, self._last.get(push.sender, 0))
            return [before] if before in self._held else []
        return [] if push.version == self._version else [name for name in self._held if not name[0]]

    def _abandoned(self, version: int, size: int, but: Sequence[_Name]) -> list[_Name]:
        """Asynchronous pushes that nobody seems to wait for, the oldest first, until they make that much room."""
        patience = len(self._held) + _VERSIONS_KEPT
        found: list[_Name] = []
        for name, held in self._held.items():
            if size > 0 and name[0] and name not in but and version - held.since > patience:
                found.append(name)
                size -= held.size
        return found

    def _drop(self, names: Iterable[_Name]) -> None:
        for name in names:
            self._bytes -= self._held.pop(name).size
            self._last.pop(name[0], None)

    def missing(self, sums: RowSums) -> tuple[int, ...]:
        """Those of the pushes in a sum, each once, that are not here."""
        there = bool(sums.sender) or sums.version == self._version
        numbers = dict.fromkeys(term.micro_batch for term in sums.terms)
        return tuple(number for number in numbers if not there or (sums.sender, number) not in self._held)

    def parts(self, sender: str) -> Mapping[int, Sequence[Mapping[str, Slices]]]:
        """The parts of every push of a sender ("": of synchronous pushes), by micro-batch or sequence."""
        return {name[1]: held.push.parts for name, held in self._held.items() if name[0] == sender}

    def clear(self) -> None:
        """Forgets everything."""
        self._version, self._held, self._last, self._bytes = -1, {}, {}, 0


def _name_of(push: RowPush) -> _Name:
    return push.sender, push.micro_batch
