"""The interface of every replica group: how replicas are grouped, collectives on arrays, and what all must agree on."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

import elastable.embedding_store.errors as errors
from elastable.embedding_store.contract.arrays import Array, UInt8
from elastable.embedding_store.contract.malformed import Document
from elastable.embedding_store.errors import BadInput, ElastableError, StoreFailed

# How replicas are divided into groups: by stride and size, as PopART's `ReplicaGrouping` and `CommGroup`


_KINDS = ("all", "consecutive", "orthogonal")


@dataclass(frozen=True, slots=True)
class ReplicaGrouping:
    """Groups of equal size, whose members follow each other at a stride.

    Attributes:
        replicas: Number of replicas in all groups.
        stride: Distance from one member of a group to the next.
        group_size: Members of a group.

    Raises:
        BadInput: a number below 1, or `stride * group_size` does not divide `replicas`.
    """

    replicas: int
    stride: int
    group_size: int

    def __post_init__(self) -> None:
        for name in ("replicas", "stride", "group_size"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} of a replica grouping must be at least 1, got {getattr(self, name)}")
        if self.replicas % (self.stride * self.group_size):
            raise BadInput(
                f"{self.replicas} replicas cannot be divided into groups of {self.group_size} at stride {self.stride}: "
                f"{self.stride} x {self.group_size} does not divide {self.replicas}"
            )

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.replicas // self.group_size

    def group_of(self, rank: int) -> int:
        """The group of a replica. Raises BadInput if there is no such rank."""
        if not 0 <= rank < self.replicas:
            raise BadInput(f"there is no replica {rank}; the ranks are 0 to {self.replicas - 1}")
        return rank % self.stride + self.stride * (rank // (self.stride * self.group_size))

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group, ascending. Raises BadInput if there is no such group."""
        if not 0 <= group < self.groups:
            raise BadInput(f"there is no group {group}; the groups are 0 to {self.groups - 1}")
        first = group % self.stride + group // self.stride * self.stride * self.group_size
        return tuple(first + place * self.stride for place in range(self.group_size))

    def transposed(self) -> "ReplicaGrouping":
        """The grouping of replicas with the same position in their groups. Raises BadInput if their stride varies."""
        if self.group_size == self.replicas:
            return ReplicaGrouping(self.replicas, 1, 1)
        if self.group_size == 1:
            return ReplicaGrouping(self.replicas, 1, self.replicas)
        if self.stride == 1:
            return ReplicaGrouping(self.replicas, self.group_size, self.groups)
        if self.stride * self.group_size == self.replicas:
            return ReplicaGrouping(self.replicas, 1, self.stride)
        raise BadInput(
            f"groups of {self.group_size} at stride {self.stride} of {self.replicas} replicas have no transpose: "
            "replicas with the same position do not follow each other at one stride"
        )


@dataclass(frozen=True, slots=True)
class CommGroup:
    """Which replicas communicate, for any number of replicas.

    Attributes:
        kind: "all"; "consecutive": groups of neighbours; "orthogonal": groups
            whose members are as far apart as there are groups.
        size: Members of a group; ignored for "all".

    Raises:
        BadInput: another kind, or a size below 1.
    """

    kind: str = "all"
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise BadInput(f"comm group {self.kind!r}: known are {', '.join(_KINDS)}")
        if self.kind != "all" and self.size < 1:
            raise BadInput(f"a {self.kind} comm group needs a size of at least 1, got {self.size}")

    def grouping(self, replicas: int) -> ReplicaGrouping:
        """The grouping of this many replicas. Raises BadInput if `size` does not divide them."""
        if self.kind == "all":
            return ReplicaGrouping(replicas, 1, replicas)
        if replicas % self.size:
            raise BadInput(f"{self.kind} groups of {self.size}: {self.size} does not divide {replicas} replicas")
        return ReplicaGrouping(replicas, 1 if self.kind == "consecutive" else replicas // self.size, self.size)


Number = TypeVar("Number", bound=np.generic)
Result = TypeVar("Result")

REDUCTIONS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
"""Reductions by name."""


class ReplicaGroup(ABC):
    """This member's view of a group whose members call the same collectives in the same order.

    Every member calls the same method with matching arrays, and each gets its result once all have called. Inputs may
    be reused when a call returns; results belong to the caller. Reductions fold in rank order, one operation after the
    other, so their bits are the same on every member, in every kind of group.

    A group that has failed once keeps failing: its members no longer agree on what was exchanged.

    All collectives raise:
        DeadlineExceeded: a member has not called within the deadline; names its rank.
        Unavailable: a member has left; names its rank and, if known, the reason.
        BadInput: the members' arguments do not match.

    Attributes:
        rank: Rank of this member, from 0.
        size: Number of members.
        ranks: By rank here, the members' ranks in the outermost group.
        bytes_sent: Bytes sent to other members through this object and its subgroups.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        self.bytes_sent = 0
        self._outer: ReplicaGroup | None = None

    # -- collectives

    def all_gather(self, array: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """`[size, ...]`: every member's array `[...]`, of the same dtype and shape, by rank."""
        mine = _contiguous(array)
        found = np.empty((self.size, *mine.shape), mine.dtype)
        self._count(mine.nbytes * (self.size - 1))
        what = f"all_gather of {_name(mine.dtype)} {list(mine.shape)}"
        self._exchange(what, [_bytes(mine)] * self.size, [_bytes(row) for row in _rows(found)])
        return found

    def all_gather_uneven(self, array: npt.NDArray[Number]) -> list[npt.NDArray[Number]]:
        """Every member's array `[n, ...]` by rank; n may differ, dtype and `...` may not."""
        mine = np.ascontiguousarray(array)
        if np.ndim(array) < 1:
            raise BadInput("all_gather_uneven gathers along a first axis; got an array of rank 0")
        lengths = self.all_gather(np.array(len(mine), np.int64))
        found = [np.empty((int(length), *mine.shape[1:]), mine.dtype) for length in lengths]
        self._count(mine.nbytes * (self.size - 1))
        what = f"all_gather_uneven of {_kind(mine)}"
        self._exchange(what, [_bytes(mine)] * self.size, [_bytes(block) for block in found])
        return found

    def all_to_all(self, array: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """`[size, ...]`: row j of member i becomes row i of member j; dtype and shape are the same on all."""
        mine = self._by_rank("all_to_all", array)
        return self._all_to_all(f"all_to_all of {_name(mine.dtype)} {list(mine.shape)}", mine)

    def all_to_all_uneven(
        self, blocks: Sequence[npt.NDArray[Number]], lengths: Sequence[int] | None = None
    ) -> list[npt.NDArray[Number]]:
        """Block j of member i becomes block i of member j.

        Args:
            blocks: For each rank `[n, ...]`; dtype and `...` are the same for all blocks of all members.
            lengths: n of the blocks to receive, by rank (trusted; given by all members or by
                none); None: exchanged first.

        Returns:
            `[n, ...]` by the rank that sent it.
        """
        mine = [np.ascontiguousarray(block) for block in blocks]
        if len(mine) != self.size or len({_kind(block) for block in mine}) != 1 or any(np.ndim(b) < 1 for b in blocks):
            shapes = ", ".join(f"{block.dtype} {list(np.shape(block))}" for block in blocks)
            raise BadInput(
                f"all_to_all_uneven needs one block [n, ...] for each of {self.size} members, all of one dtype and one "
                f"shape behind n; got {len(mine)}: {shapes}"
            )
        if lengths is None:
            lengths = self.all_to_all(np.array([len(block) for block in mine], np.int64)).tolist()
        found = [np.empty((length, *mine[0].shape[1:]), mine[0].dtype) for length in lengths]
        self._count(sum(block.nbytes for rank, block in enumerate(mine) if rank != self.rank))
        what = f"all_to_all_uneven of {_kind(mine[0])}"
        self._exchange(what, [_bytes(block) for block in mine], [_bytes(block) for block in found])
        return found

    def reduce_scatter(self, array: npt.NDArray[Number], reduction: str = "sum") -> npt.NDArray[Number]:
        """`[...]`: the members' rows `rank` of `[size, ...]`, reduced in rank order.

        Args:
            array: Numbers `[size, ...]`; dtype and shape are the same on every member.
            reduction: One of `REDUCTIONS`.
        """
        _fold(reduction)
        mine = self._by_rank("reduce_scatter", array)
        return self._reduced(f"reduce_scatter {reduction} of {_name(mine.dtype)} {list(mine.shape)}", mine, reduction)

    def all_reduce(self, array: npt.NDArray[Number], reduction: str = "sum") -> npt.NDArray[Number]:
        """The members' arrays, reduced in rank order; the same bits on every member.

        Args:
            array: Numbers; dtype and shape are the same on every member.
            reduction: One of `REDUCTIONS`.
        """
        _fold(reduction)
        given = _contiguous(array)
        flat: npt.NDArray[Number] = given.reshape(-1)
        part = -(-flat.size // self.size)
        padded = flat
        if flat.size % self.size:
            padded = np.zeros(part * self.size, flat.dtype)
            padded[: flat.size] = flat
        what = f"all_reduce {reduction} of {_name(given.dtype)} {list(given.shape)}"
        mine = self._reduced(what, padded.reshape(self.size, part), reduction)
        whole = self.all_gather(mine).reshape(-1)[: flat.size]
        return whole.reshape(given.shape)

    def broadcast(self, array: npt.NDArray[Number], root: int = 0) -> npt.NDArray[Number]:
        """The array of member `root`; others give one of its dtype and shape, whose values are ignored."""
        if not 0 <= root < self.size:
            raise BadInput(f"broadcast from rank {root}: the ranks are 0 to {self.size - 1}")
        mine = _contiguous(array)
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

    def subgroup(self, comm_group: CommGroup | ReplicaGrouping) -> "ReplicaGroup":
        """The subgroup that this member belongs to; every member calls it.

        Raises:
            BadInput: the size of the subgroups does not divide this group's.
        """
        grouping = comm_group.grouping(self.size) if isinstance(comm_group, CommGroup) else comm_group
        if grouping.replicas != self.size:
            raise BadInput(f"a grouping of {grouping.replicas} replicas cannot divide a group of {self.size}")
        members = grouping.members(grouping.group_of(self.rank))
        part = self._part(f"subgroup {grouping}", members)
        part._outer = self
        return part

    @property
    def outermost(self) -> "ReplicaGroup":
        """The group that contains this one and is not itself a subgroup."""
        return self if self._outer is None else self._outer.outermost

    def close(self) -> None:
        """Leaves the group; collectives of the others then fail, naming this rank. Closing twice is harmless."""
        self.leave("closed")

    @abstractmethod
    def leave(self, why: str) -> None:
        """Leaves the outermost group and all its subgroups, and tells the others why. Leaving twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.leave(f"{type(error).__name__}: {error}")

    # -- implemented by each kind of group

    @abstractmethod
    def _exchange(self, what: str, send: Sequence[UInt8], receive: Sequence[UInt8]) -> None:
        """Copies `send[j]` of member i to `receive[i]` of member j. Raises BadInput unless `what` is equal on all."""

    @abstractmethod
    def _part(self, what: str, members: Sequence[int]) -> "ReplicaGroup":
        """The subgroup of these ranks, of which this member is one; every member calls it."""

    def _all_to_all(self, what: str, mine: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """`all_to_all` of contiguous rows, under the name of the collective that the user has called."""
        found = np.empty_like(mine)
        self._count(mine.nbytes // self.size * (self.size - 1))
        self._exchange(what, [_bytes(row) for row in _rows(mine)], [_bytes(row) for row in _rows(found)])
        return found

    def _reduced(self, what: str, mine: npt.NDArray[Number], reduction: str) -> npt.NDArray[Number]:
        """`reduce_scatter` of contiguous rows, under the name of the collective that the user has called."""
        fold, rows = _fold(reduction), self._all_to_all(what, mine)
        # Keeps its axis, so that a single number is still an array.
        total = fold(rows[:1], rows[1:2]) if self.size > 1 else rows
        for place in range(2, self.size):
            fold(total, rows[place : place + 1], out=total)
        return total[0] if total.ndim > 1 else total.reshape(())

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


def _contiguous(array: npt.NDArray[Number]) -> npt.NDArray[Number]:
    return np.asarray(array, order="C")


@lru_cache(64)
def _name(dtype: np.dtype[np.generic]) -> str:
    """Cached: NumPy takes as long to format a dtype as a small exchange."""
    return str(dtype)


def _kind(array: Array) -> str:
    return f"{_name(array.dtype)} [n{''.join(f', {length}' for length in array.shape[1:])}]"


def _rows(array: Array) -> list[Array]:
    """Views of the rows, also of single numbers."""
    return [array[place : place + 1] for place in range(len(array))]


def _bytes(array: Array) -> UInt8:
    """A view of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


# Replicas that succeed or fail together: settings are compared, and an error on one is raised on all


def require_same(group: ReplicaGroup, what: str, described: Mapping[str, object]) -> None:
    """Compares a description across replicas; every member calls it.

    Args:
        what: What is described; begins the error message.
        described: Name -> JSON value.

    Raises:
        BadInput: on every member; names the first difference and the rank that differs.
    """
    heard = [json.loads(text) for text in _exchanged(group, json.dumps(described, sort_keys=True))]
    for rank, other in enumerate(heard):
        for name in sorted({*heard[0], *other}):
            first, theirs = heard[0].get(name), other.get(name)
            if first != theirs:
                raise BadInput(
                    f"{what}: replicas differ in {name}: rank {group.ranks[0]} has {first!r}, "
                    f"rank {group.ranks[rank]} has {theirs!r}"
                )


@contextmanager
def fail_together(group: ReplicaGroup) -> Iterator[None]:
    """Every member enters it; an ElastableError that a member's block raises is raised on all of them.

    The block must not call collectives: a member that failed no longer takes part in them.

    Raises:
        ElastableError: this member's own error, or StoreFailed with another's rank and message.
    """
    if group.size == 1:
        yield
        return
    error: ElastableError | None = None
    try:
        yield
    except ElastableError as failure:
        error = failure
    heard = _exchanged(group, "" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(heard):
        if text:
            raise StoreFailed(f"rank {group.ranks[rank]}: {text}")


def run_at_root(group: ReplicaGroup, work: Callable[[], Result]) -> Result:
    """Runs `work` on rank 0 alone; every member calls this and gets what it returned, as JSON has it.

    Raises:
        ElastableError: what `work` raised, with the same class and message on every member.
    """
    message, failure = Document(), None
    if group.rank == 0:
        try:
            message = {"result": work()}
        except ElastableError as error:
            message, failure = {"kind": type(error).__name__, "result": str(error)}, error
    heard: Document = json.loads(_exchanged(group, json.dumps(message) if group.rank == 0 else "")[0])
    if failure is not None:
        raise failure
    if "kind" in heard:
        kind: type[ElastableError] = getattr(errors, heard["kind"], ElastableError)
        raise kind(heard["result"])
    result: Result = heard["result"]
    return result


def _exchanged(group: ReplicaGroup, text: str) -> list[str]:
    return [found.tobytes().decode() for found in group.all_gather_uneven(np.frombuffer(text.encode(), np.uint8))]
