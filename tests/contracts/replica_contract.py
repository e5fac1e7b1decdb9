"""What every kind of replica group must do. A subclass says how a function is run in all members of a group."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, Unavailable
from elastable.replicas.groups.group import CommGroup, ReplicaGroup

Run = Callable[..., list[Any]]
"""`run(size, work, deadline_s=...)`: what `work(group)` returned, by rank."""


def _all_gather(group: ReplicaGroup) -> object:
    return [group.all_gather(array) for array in _arrays(group.rank)]


def _arrays(rank: int) -> list[Array]:
    return [
        np.arange(6, dtype=np.float32).reshape(2, 3) + rank,
        np.array(rank, np.int64),
        np.zeros((0, 4), np.float16),
        np.full((3, 1), rank % 2 == 0),
        np.arange(8, dtype=np.float64).reshape(2, 4).T * rank,  # not contiguous
    ]


class ReplicaContract:
    """`run` is a fixture."""

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_all_gather(self, run: Run, size: int) -> None:
        expected = [np.stack(arrays) for arrays in zip(*(_arrays(rank) for rank in range(size)), strict=True)]
        for found in run(size, _all_gather):
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs, strict=True)

    @pytest.mark.parametrize("size", [1, 3])
    def test_all_gather_of_uneven_lengths(self, run: Run, size: int) -> None:
        def work(group: ReplicaGroup) -> list[Array]:
            return group.all_gather_uneven(np.full((group.rank * 2, 3), group.rank, np.int32))

        for found in run(size, work):
            for rank, block in enumerate(found):
                np.testing.assert_array_equal(block, np.full((rank * 2, 3), rank, np.int32), strict=True)

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_all_to_all(self, run: Run, size: int) -> None:
        def work(group: ReplicaGroup) -> Array:
            return group.all_to_all(np.array([[group.rank, to] for to in range(size)], np.int64))

        for rank, found in enumerate(run(size, work)):
            np.testing.assert_array_equal(found, [[sender, rank] for sender in range(size)])

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_all_to_all_of_uneven_lengths(self, run: Run, size: int) -> None:
        def work(group: ReplicaGroup) -> list[Array]:
            blocks = [np.full((group.rank + to, 2), 10 * group.rank + to, np.float32) for to in range(size)]
            found = group.all_to_all_uneven(blocks)
            known = group.all_to_all_uneven(blocks, [sender + group.rank for sender in range(size)])
            assert [block.tolist() for block in known] == [block.tolist() for block in found]
            return found

        for rank, found in enumerate(run(size, work)):
            for sender, block in enumerate(found):
                np.testing.assert_array_equal(block, np.full((sender + rank, 2), 10 * sender + rank, np.float32))

    def test_reduce_scatter(self, run: Run) -> None:
        """Source: PopART, collectives over 4 replicas and over consecutive pairs."""

        def work(group: ReplicaGroup) -> tuple[Array, Array]:
            pair = group.subgroup(CommGroup("consecutive", 2))
            values = np.arange(12, dtype=np.float32)
            return group.reduce_scatter(values.reshape(4, 3)), pair.reduce_scatter(values.reshape(2, 6))

        for rank, (of_all, of_pair) in enumerate(run(4, work)):
            np.testing.assert_array_equal(of_all, 4 * np.arange(12).reshape(4, 3)[rank])
            np.testing.assert_array_equal(of_pair, 2 * np.arange(12).reshape(2, 6)[rank % 2])

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize("reduction", ["sum", "max", "min"])
    def test_all_reduce_folds_in_rank_order(self, run: Run, size: int, reduction: str) -> None:
        values = np.random.default_rng(7).normal(size=(size, 5, 3)).astype(np.float32)
        folded = {"sum": np.add, "max": np.maximum, "min": np.minimum}[reduction]
        expected = values[0]
        for row in values[1:]:
            expected = folded(expected, row)
        for found in run(size, lambda group: group.all_reduce(values[group.rank], reduction)):
            np.testing.assert_array_equal(found, expected, strict=True)
        for found in run(size, lambda group: group.all_reduce(np.float64(group.rank + 1), reduction)):
            assert found == {"sum": size * (size + 1) / 2, "max": size, "min": 1}[reduction]

    def test_broadcast_and_barrier(self, run: Run) -> None:
        def work(group: ReplicaGroup) -> Array:
            group.barrier()
            return group.broadcast(np.full((2, 2), group.rank, np.int16), root=2)

        for found in run(3, work):
            np.testing.assert_array_equal(found, np.full((2, 2), 2, np.int16), strict=True)

    def test_what_was_handed_in_is_free_again(self, run: Run) -> None:
        def work(group: ReplicaGroup) -> list[Array]:
            mine, found = np.zeros((group.size, 4), np.int64), []
            for step in range(20):
                mine[:] = 100 * step + group.rank
                found.append(group.all_to_all(mine))
            return found

        for found in run(3, work):
            for step, rows in enumerate(found):
                np.testing.assert_array_equal(rows, [[100 * step + sender] * 4 for sender in range(3)])

    def test_subgroups(self, run: Run) -> None:
        def work(group: ReplicaGroup) -> object:
            columns = group.subgroup(CommGroup("orthogonal", 2))
            everyone = columns.all_gather(np.array(group.rank))
            alone = columns.subgroup(CommGroup("consecutive", 1))
            assert alone.outermost is columns.outermost is group.outermost is group
            return columns.rank, columns.ranks, everyone.tolist(), alone.ranks

        assert run(4, work) == [
            (0, (0, 2), [0, 2], (0,)),
            (0, (1, 3), [1, 3], (1,)),
            (1, (0, 2), [0, 2], (2,)),
            (1, (1, 3), [1, 3], (3,)),
        ]

    def test_bytes_sent_are_those_to_others(self, run: Run) -> None:
        def work(group: ReplicaGroup) -> list[int]:
            sent = []
            for exchange in (
                lambda: group.all_gather(np.zeros(10, np.float32)),
                lambda: group.all_to_all(np.zeros((3, 10), np.float32)),
                lambda: group.all_reduce(np.zeros(30, np.float32)),
                lambda: group.subgroup(CommGroup("consecutive", 1)).all_gather(np.zeros(10)),
            ):
                before = group.bytes_sent
                exchange()
                sent.append(group.bytes_sent - before)
            return sent

        assert run(3, work) == [[80, 80, 160, 0]] * 3

    @pytest.mark.parametrize(
        ("calls", "message"),
        [
            (lambda group, x: group.all_gather(x[: 3 + group.rank]), r"rank 0 .* all_gather of float64 \[3\], .*\[4\]"),
            (
                lambda group, x: group.all_gather(x) if group.rank else group.all_to_all(x.reshape(2, 2)),
                "rank 0 calls all_to_all.*, and rank 1 all_gather",
            ),
            (lambda group, x: group.all_reduce(x, ("sum", "max")[group.rank]), "all_reduce sum .*all_reduce max"),
            (lambda group, x: group.all_reduce(x[: 3 + group.rank]), r"all_reduce sum of .*\[3\].*\[4\]"),
            (lambda group, x: group.all_reduce(x.reshape(((4,), (2, 2))[group.rank])), r"\[4\].*\[2, 2\]"),
            (lambda group, x: group.reduce_scatter(x.reshape(2, 2), ("min", "sum")[group.rank]), "scatter min.*sum"),
            (
                lambda group, x: (group.all_to_all if group.rank else group.reduce_scatter)(x.reshape(2, 2)),
                "rank 0 calls reduce_scatter sum of .*, and rank 1 all_to_all of",
            ),
        ],
    )
    def test_calls_that_differ_are_reported(
        self, run: Run, calls: Callable[[ReplicaGroup, Array], object], message: str
    ) -> None:
        def work(group: ReplicaGroup) -> object:
            with pytest.raises(BadInput, match=message):
                calls(group, np.arange(4.0))
            return group.all_reduce(np.ones(3)).tolist()  # nothing was exchanged, and the group is usable

        assert run(2, work) == [[2.0] * 3] * 2

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda group: group.all_to_all(np.zeros((3, 2))), r"an array \[2, ...\].*got \[3, 2\]"),
            (lambda group: group.reduce_scatter(np.float32(1)), r"an array \[2, ...\].*got \[\]"),
            (lambda group: group.all_to_all_uneven([np.zeros(1)]), "for each of 2 members.*got 1"),
            (lambda group: group.all_to_all_uneven([np.zeros(1), np.zeros(1, np.int8)]), "of one dtype"),
            (lambda group: group.all_gather_uneven(np.zeros(())), "rank 0"),
            (lambda group: group.all_reduce(np.zeros(2), "mean"), "reduction 'mean': known are sum, max, min"),
            (lambda group: group.broadcast(np.zeros(2), root=2), "from rank 2: the ranks are 0 to 1"),
            (lambda group: group.subgroup(CommGroup("consecutive", 3)), "3 does not divide 2 replicas"),
        ],
    )
    def test_what_cannot_be_is_refused(self, run: Run, call: Callable[[ReplicaGroup], object], message: str) -> None:
        with pytest.raises(BadInput, match=message):
            run(2, call)

    def test_one_that_does_not_come_is_named(self, run: Run) -> None:
        def work(group: ReplicaGroup) -> str | None:
            if group.rank == 1:
                if not group.ranks:
                    group.barrier()
                return None
            with pytest.raises((DeadlineExceeded, Unavailable), match="rank 1"):
                group.all_gather(np.zeros(2))
            with pytest.raises((DeadlineExceeded, Unavailable), match="rank 1"):  # it has failed once and for all
                group.barrier()
            return "failed"

        assert run(3, work, deadline_s=20.0) == ["failed", None, "failed"]

    def test_one_that_leaves_fails_the_others_by_its_rank(self, run: Run) -> None:
        def work(group: ReplicaGroup) -> str:
            part = group.subgroup(CommGroup("all"))
            if group.rank == 2:
                part.leave("ValueError: no such entity")
                return "left"
            with pytest.raises(Unavailable, match=r"rank 2 has left.* no such entity"):
                part.barrier()
            with pytest.raises(Unavailable, match=r"rank 2 has left.* no such entity"):
                group.barrier()
            return "failed"

        assert run(3, work) == ["failed", "failed", "left"]

    def test_one_that_fails_inside_its_group_says_by_what(self, run: Run) -> None:
        def inside(group: ReplicaGroup) -> None:
            with group:
                if group.rank == 0:
                    raise ValueError("no such entity")
                group.barrier()

        def work(group: ReplicaGroup) -> str:
            with pytest.raises((ValueError, Unavailable), match="no such entity"):
                inside(group)
            return "failed"

        assert run(2, work) == ["failed", "failed"]

    def test_one_that_raises_raises_for_all(self, run: Run) -> None:
        def work(group: ReplicaGroup) -> None:
            if group.rank == 1:
                raise ValueError("no such entity")
            group.barrier()

        with pytest.raises(ValueError, match="no such entity"):
            run(3, work)

    def test_what_was_sent_before_leaving_arrives(self, run: Run) -> None:
        def work(group: ReplicaGroup) -> list[int]:
            if group.rank == 0:
                time.sleep(0.05)  # the others have left by now
            return group.all_gather(np.full(100_000, group.rank))[:, -1].tolist()

        assert run(3, work) == [[0, 1, 2]] * 3
