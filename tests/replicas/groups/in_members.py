"""The contract and more, run by every member of four processes at once; `test_mpi` starts them."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import DeadlineExceeded, Unavailable
from elastable.replicas.groups import mpi_group
from elastable.replicas.groups.group import CommGroup, ReplicaGroup
from elastable.replicas.groups.mpi_group import MpiGroup
from elastable.replicas.groups.world import replica_group, world_communicator
from tests.contracts.replica_contract import ReplicaContract, Run
from tests.replicas.groups.mpi_run import MEMBERS


@cache
def everyone() -> ReplicaGroup:
    """Where members tell each other what came out; never one of the groups that are tested."""
    return replica_group(deadline_s=120.0)


def run_members(size: int, work: Callable[[ReplicaGroup], object], deadline_s: float = 60.0) -> list[Any]:
    """As `run_threads`, of which every member calls this one; members beyond `size` look on."""
    mine: tuple[float, Exception | None, object] = (0.0, None, None)
    group = everyone()
    if group.rank < size:
        part = MpiGroup.of(world_communicator(60.0), range(size), 60.0)
        wait_for_others(part, deadline_s)
        try:
            mine = (0.0, None, work(part))
            part.leave("its work is done")
        except Exception as error:  # noqa: BLE001 - raised again on every member
            mine = (time.monotonic(), error, None)
            part.leave(f"{type(error).__name__}: {error}")
        part.close()
    pickled = group.all_gather_uneven(np.frombuffer(pickle.dumps(mine), np.uint8))
    outcomes = [pickle.loads(one.tobytes()) for one in pickled]
    failures = [(at, error) for at, error, _ in outcomes if error is not None]
    if failures:
        # The cause, rather than what it made others raise.
        raise min(failures, key=lambda one: (isinstance(one[1], Unavailable | DeadlineExceeded), one[0]))[1]
    return [found for *_, found in outcomes[:size]]


def wait_for_others(group: ReplicaGroup, deadline_s: float) -> None:
    """From now on the group waits for no longer; its members may have met at leisure."""
    assert isinstance(group, MpiGroup)
    group._channel.deadline_s = deadline_s


class TestContract(ReplicaContract):
    @pytest.fixture
    def run(self) -> Run:
        return run_members


# Members must draw the same examples.
same_everywhere = settings(
    derandomize=True, database=None, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck)
)
LENGTHS = st.one_of(st.integers(0, 6), st.sampled_from([239, 240, 241, 480, 481, 5000]))  # 480 doubles are sent at once


@same_everywhere
@given(
    lengths=st.lists(st.lists(LENGTHS, min_size=MEMBERS, max_size=MEMBERS), min_size=MEMBERS, max_size=MEMBERS),
    width=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 99),
)
def test_uneven_exchanges_are_a_transpose(lengths: list[list[int]], width: int, seed: int) -> None:
    """Whatever the lengths: block j of member i is block i of member j; what is gathered is everyone's."""
    random = np.random.default_rng(seed)
    blocks = [[random.normal(size=(length, width)) for length in row] for row in lengths]
    group = everyone()
    found = group.all_to_all_uneven(blocks[group.rank])
    for ours, row in zip(found, blocks, strict=True):
        np.testing.assert_array_equal(ours, row[group.rank], strict=True)
    for ours, row in zip(group.all_gather_uneven(blocks[group.rank][0]), blocks, strict=True):
        np.testing.assert_array_equal(ours, row[0], strict=True)


def test_large_payloads_are_sent_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_group, "_CHUNK_BYTES", 4096)
    group = everyone()
    for length in (4095, 4096, 4097, 50_001):
        found = group.all_gather(np.arange(length, dtype=np.uint8) + np.uint8(group.rank))
        np.testing.assert_array_equal(found, [np.arange(length, dtype=np.uint8) + np.uint8(r) for r in range(MEMBERS)])


def test_a_member_that_waits_for_another_is_not_blamed() -> None:
    """Rank 0 waits for rank 2, which waits for rank 3, which does something else."""

    def work(group: ReplicaGroup) -> object:
        pairs = group.subgroup(CommGroup("consecutive", 2))
        across = group.subgroup(CommGroup("orthogonal", 2))
        group.barrier()
        message = ""
        if group.rank != 3:
            # Rank 2 waits for 3, rank 0 for 2; rank 1 for 3, too. When the others ask rank 2, it waits yet.
            waits = pairs if group.rank == 2 else across
            wait_for_others(waits, 6.0 if group.rank == 2 else 0.6)
            with pytest.raises(DeadlineExceeded) as caught:
                waits.barrier()
            message = str(caught.value)
        everyone().barrier()  # nobody has left before all have the error
        return message

    zero, one, two, _ = run_members(4, work)
    assert "rank 2" in zero
    assert "rank 3" in one
    assert "rank 3" in two
    assert "rank 3 is elsewhere" in one
    assert "rank 2 is in all_gather of uint8 [], waiting for rank 3; rank 3 is elsewhere" in zero


def test_a_death_that_mpi_notices_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(requests: list[object]) -> bool:
        raise mpi_group.MPI.Exception(mpi_group.MPI.ERR_OTHER)

    breaking = SimpleNamespace(**vars(mpi_group.MPI))
    breaking.Request = SimpleNamespace(Testall=give_up)

    def work(group: ReplicaGroup) -> object:
        group.barrier()
        if group.rank == 3:
            time.sleep(0.3)
            return "gone"
        with monkeypatch.context() as patch:
            patch.setattr(mpi_group, "MPI", breaking)
            patch.setattr(mpi_group, "_HEARD_S", 60.0)
            with pytest.raises(Unavailable) as caught:
                group.barrier()
        with pytest.raises(Unavailable, match="rank 3"):
            group.barrier()  # it stays broken, for the same reason
        return str(caught.value)

    assert run_members(4, work) == ["rank 3 has left the group: its work is done"] * 3 + ["gone"]


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("victim", range(MEMBERS))
def test_a_member_stopped_during_an_exchange_is_named(victim: int, in_pairs: bool) -> None:
    block = np.zeros((2, 200_000))

    def work(group: ReplicaGroup) -> object:
        pids = group.all_gather(np.int64(os.getpid()))  # type: ignore[arg-type, var-annotated]
        part = group.subgroup(CommGroup("consecutive", 2 if in_pairs else 4))
        group.barrier()
        for each in (group, part):
            wait_for_others(each, 1.0)
        if group.rank == victim:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        message = ""
        try:
            for _ in range(10 if victim not in part.ranks else 1_000_000):
                part.all_to_all(np.resize(block, (part.size, 100_000)))
            group.barrier()
        except (DeadlineExceeded, Unavailable) as error:
            message = str(error)
        if group.rank != victim:
            others = [rank for rank in range(MEMBERS) if rank != victim]
            with MpiGroup.of(world_communicator(60.0), others, 60.0) as group_of_all:
                group_of_all.barrier()
                os.kill(int(pids[victim]), signal.SIGCONT)
        return message

    found = run_members(MEMBERS, work)
    for rank, message in enumerate(found):
        if rank != victim:
            assert f"rank {victim} " in message, found
    near = victim ^ 1  # waits for the victim and for nobody else, whoever gives up first
    if in_pairs:
        assert f"rank {victim} has not come within 1 s; rank {victim} does not answer" in found[near]


def test_members_on_several_hosts_meet_by_the_addresses_of_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = everyone().rank
    monkeypatch.setattr(mpi_group, "this_host", lambda: f"host {rank // 2}")

    def work(group: ReplicaGroup) -> object:
        assert group.all_gather(np.array(group.rank)).tolist() == list(range(MEMBERS))
        if group.rank == 1:
            return "left"
        with pytest.raises(Unavailable, match="rank 1 has left the group: its work is done"):
            group.barrier()
        return "failed"

    assert run_members(MEMBERS, work) == ["failed", "left", "failed", "failed"]


def test_a_new_group_can_replace_a_failed_one() -> None:
    def fail(group: ReplicaGroup) -> object:
        if group.rank == 1:
            return "left"
        with pytest.raises(Unavailable, match="rank 1"):
            group.all_gather(np.zeros(1_000_000))
        return "failed"

    for _ in range(3):
        assert run_members(3, fail) == ["failed", "left", "failed"]
        assert run_members(3, lambda group: group.all_reduce(np.int64(group.rank)).item()) == [3, 3, 3]  # type: ignore[arg-type]
