"""What every replica group can do: collectives on NumPy arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.errors import BadInput
from elastable.replicas.groups.grouping import CommGroup, ReplicaGrouping

__all__ = ["REDUCTIONS", "Array", "Bytes", "ReplicaGroup"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Number = TypeVar("Number", bound=np.generic)

REDUCTIONS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
"""Ways to reduce."""


class ReplicaGroup(ABC):
    """This member's view of a group whose members call the same collectives in the same order.

    Every member calls the same method with arrays that fit each other's, and
    each gets its result once all have called. Arrays that are handed in are
    free again when a call returns; results are the caller's own. Reductions
    fold in rank order, one operation after the other, so that their bits are
    the same on every member, in every kind of group.

    A group that has failed once fails ever after: its members no longer agree
    on what was exchanged.

    All collectives raise:
        DeadlineExceeded: a member has not called within the deadline; names its rank.
        Unavailable: a member is gone; names its rank, and why where it is known.
        BadInput: what the members hand in does not fit each other's.

    Attributes:
        rank: Of this member, from 0.
        size: How many members there are.
        ranks: Of all members, by their rank here: their ranks in the outermost group.
        bytes_sent: To other members so far, through this object and its subgroups.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        self.bytes_sent = 0
        self._outer: ReplicaGroup | None = None

    # -- collectives

    def all_gather(self, array: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Everyone's array.

        Args:
            array: Any dtype, any shape `[...]`, the same on every member.

        Returns:
            `[size, ...]`: by rank.
        """
        mine = _laid(array)
        found = np.empty((self.size, *mine.shape), mine.dtype)
        self._count(mine.nbytes * (self.size - 1))
        self._gather(
            f"all_gather of {_name(mine.dtype)} {list(mine.shape)}", _bytes(mine), [_bytes(row) for row in _rows(found)]
        )
        return found

    def all_gather_uneven(self, array: npt.NDArray[Number]) -> list[npt.NDArray[Number]]:
        """Everyone's array, where their first axes differ in length.

        Args:
            array: Any dtype, `[n, ...]`; dtype and `...` the same on every member.

        Returns:
            By rank, `[n of that member, ...]`.
        """
        mine = np.ascontiguousarray(array)
        if np.ndim(array) < 1:
            raise BadInput("all_gather_uneven gathers along a first axis; got an array of rank 0")
        lengths = self.all_gather(np.array(len(mine), np.int64))
        found = [np.empty((int(length), *mine.shape[1:]), mine.dtype) for length in lengths]
        self._count(mine.nbytes * (self.size - 1))
        self._gather(f"all_gather_uneven of {_kind(mine)}", _bytes(mine), [_bytes(block) for block in found])
        return found

    def all_to_all(self, array: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Row j of member i becomes row i of member j.

        Args:
            array: Any dtype, `[size, ...]`, the same shape on every member.

        Returns:
            `[size, ...]`: by the rank that it came from.
        """
        mine = self._by_rank("all_to_all", array)
        found = np.empty_like(mine)
        self._count(mine.nbytes // self.size * (self.size - 1))
        what = f"all_to_all of {_name(mine.dtype)} {list(mine.shape)}"
        self._exchange(what, [_bytes(row) for row in _rows(mine)], [_bytes(row) for row in _rows(found)])
        return found

    def all_to_all_uneven(
        self, blocks: Sequence[npt.NDArray[Number]], lengths: Sequence[int] | None = None
    ) -> list[npt.NDArray[Number]]:
        """Block j of member i becomes block i of member j.

        Args:
            blocks: For each rank `[n, ...]`; of one dtype and one `...`, the
                same on every member.
            lengths: Of the blocks that come, by rank, where every member knows
                them (trusted; all give them or none); None: they are exchanged first.

        Returns:
            By the rank that they came from, `[n, ...]`.
        """
        mine = [np.ascontiguousarray(block) for block in blocks]
        if len(mine) != self.size or len({_kind(block) for block in mine}) != 1 or any(np.ndim(b) < 1 for b in blocks):
            told = ", ".join(f"{block.dtype} {list(np.shape(block))}" for block in blocks)
            raise BadInput(
                f"all_to_all_uneven needs one block [n, ...] for each of {self.size} members, all of one dtype and one "
                f"shape behind n; got {len(mine)}: {told}"
            )
        if lengths is None:
            lengths = self.all_to_all(np.array([len(block) for block in mine], np.int64)).tolist()
        found = [np.empty((length, *mine[0].shape[1:]), mine[0].dtype) for length in lengths]
        self._count(sum(block.nbytes for rank, block in enumerate(mine) if rank != self.rank))
        what = f"all_to_all_uneven of {_kind(mine[0])}"
        self._exchange(what, [_bytes(block) for block in mine], [_bytes(block) for block in found])
        return found

    def reduce_scatter(self, array: npt.NDArray[Number], reduction: str = "sum") -> npt.NDArray[Number]:
        """Of everyone's row j, folded in rank order, member j gets the result.

        Args:
            array: Of a number dtype, `[size, ...]`, the same shape on every member.
            reduction: One of `REDUCTIONS`.

        Returns:
            `[...]`.
        """
        fold = _fold(reduction)
        rows = self.all_to_all(self._by_rank("reduce_scatter", array))
        # With its axis, so that a single number is an array still.
        total = fold(rows[:1], rows[1:2]) if self.size > 1 else rows
        for place in range(2, self.size):
            fold(total, rows[place : place + 1], out=total)
        return total[0] if total.ndim > 1 else total.reshape(())

    def all_reduce(self, array: npt.NDArray[Number], reduction: str = "sum") -> npt.NDArray[Number]:
        """Everyone's arrays, folded in rank order; the same bits on every member.

        Args:
            array: Of a number dtype, any shape, the same on every member.
            reduction: One of `REDUCTIONS`.

        Returns:
            Of the same shape.
        """
        _fold(reduction)
        flat: npt.NDArray[Number] = _laid(array).reshape(-1)
        part = -(-flat.size // self.size)
        padded = flat
        if flat.size % self.size:
            padded = np.zeros(part * self.size, flat.dtype)
            padded[: flat.size] = flat
        mine = self.reduce_scatter(padded.reshape(self.size, part), reduction)
        whole = self.all_gather(mine).reshape(-1)[: flat.size]
        return whole.reshape(_laid(array).shape)

    def broadcast(self, array: npt.NDArray[Number], root: int = 0) -> npt.NDArray[Number]:
        """The array of the member `root`; others hand in one of its dtype and shape, whose values do not matter."""
        if not 0 <= root < self.size:
            raise BadInput(f"broadcast from rank {root}: the ranks are 0 to {self.size - 1}")
        mine = _laid(array)
        found = mine.copy()
        nothing = _bytes(np.empty(0, np.uint8))
        send = [_bytes(mine) if self.rank == root else nothing for _ in range(self.size)]
        receive = [_bytes(found) if rank == root else nothing for rank in range(self.size)]
        self._count(mine.nbytes * (self.size - 1) if self.rank == root else 0)
        self._exchange(f"broadcast of {_name(mine.dtype)} {list(mine.shape)} from {root}", send, receive)
        return found

    def barrier(self) -> None:
        """Returns once every member has called it."""
        self.all_gather(np.zeros((), np.uint8))

    def subgroup(self, comm_group: CommGroup | ReplicaGrouping) -> ReplicaGroup:
        """The part of the group that this member belongs to; every member calls it.

        Raises:
            BadInput: the size of the groups does not divide this one's.
        """
        grouping = comm_group.grouping(self.size) if isinstance(comm_group, CommGroup) else comm_group
        if grouping.replicas != self.size:
            raise BadInput(f"a grouping of {grouping.replicas} replicas cannot divide a group of {self.size}")
        members = grouping.members(grouping.group_of(self.rank))
        part = self._part(f"subgroup {grouping}", members)
        part._outer = self
        return part

    @property
    def outermost(self) -> ReplicaGroup:
        """The group that this one is a part of, of a part of, ...; itself, if it is none."""
        return self if self._outer is None else self._outer.outermost

    def close(self) -> None:
        """Leaves the group: others that go on fail by this member's rank. Closing twice is harmless."""
        self.leave("closed")

    @abstractmethod
    def leave(self, why: str) -> None:
        """Closes, and tells others why: the outermost group, too, and all parts of it. Leaving twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.leave(f"{type(error).__name__}: {error}")

    # -- what a kind of group provides

    @abstractmethod
    def _gather(self, what: str, send: Bytes, receive: Sequence[Bytes]) -> None:
        """`send` of every member into `receive` by rank, in place. `what` is the same on every member, or raises."""

    @abstractmethod
    def _exchange(self, what: str, send: Sequence[Bytes], receive: Sequence[Bytes]) -> None:
        """`send[j]` of member i into `receive[i]` of member j, in place. `what` is the same everywhere, or raises."""

    @abstractmethod
    def _part(self, what: str, members: Sequence[int]) -> ReplicaGroup:
        """The group of these ranks of this group, of which this member is one; every member calls it."""

    # -- ours

    def _count(self, sent: int) -> None:
        group: ReplicaGroup | None = self
        while group is not None:
            group.bytes_sent += sent
            group = group._outer

    def _by_rank(self, what: str, array: npt.NDArray[Number]) -> npt.NDArray[Number]:
        mine = np.ascontiguousarray(array)
        if np.ndim(array) < 1 or len(mine) != self.size:
            raise BadInput(
                f"{what} needs an array [{self.size}, ...], a row for each of {self.size} members; got "
                f"{list(np.shape(array))}"
            )
        return mine


def _fold(reduction: str) -> np.ufunc:
    if reduction not in REDUCTIONS:
        raise BadInput(f"reduction {reduction!r}: known are {', '.join(REDUCTIONS)}")
    return REDUCTIONS[reduction]


def _laid(array: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Contiguous, of the same shape."""
    return np.asarray(array, order="C")


def _empty(rows: int, like: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """`[rows, *like.shape]`."""
    return np.empty((rows, *like.shape), like.dtype)


@lru_cache(64)
def _name(dtype: np.dtype[Any]) -> str:
    """As NumPy writes it, which takes it as long as a small exchange."""
    return str(dtype)


def _kind(array: Array) -> str:
    return f"{_name(array.dtype)} [n{''.join(f', {length}' for length in array.shape[1:])}]"


def _rows(array: Array) -> list[Array]:
    """Views of the rows, also where they are single numbers."""
    return [array[place : place + 1] for place in range(len(array))]


def _bytes(array: Array) -> Bytes:
    """A view of a contiguous array."""
    return array.reshape(-1).view(np.uint8)
