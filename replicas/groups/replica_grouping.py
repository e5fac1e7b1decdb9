"""How replicas are divided into groups: by stride and size, as PopART's `ReplicaGrouping` and `CommGroup`."""

from dataclasses import dataclass

from elastable.embedding_store.errors import BadInput

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
