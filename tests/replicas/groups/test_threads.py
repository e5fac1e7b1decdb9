"""Groups of threads keep the contract of replica groups."""

import threading

import numpy as np
import pytest

from elastable.embedding_store.errors import BadInput, DeadlineExceeded
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import alone, run_threads
from tests.contracts.replica_contract import ReplicaContract, Run


class TestThreads(ReplicaContract):
    @pytest.fixture
    def run(self) -> Run:
        return run_threads


def test_a_hanging_member_is_named_within_the_deadline() -> None:
    messages, heard = list[str](), threading.Event()

    def work(group: ReplicaGroup) -> None:
        if group.rank == 1:
            assert heard.wait(60)
            return
        with pytest.raises(DeadlineExceeded) as caught:
            group.barrier()
        messages.append(str(caught.value))
        heard.set()

    run_threads(2, work, deadline_s=0.2)
    assert messages == ["all_gather of uint8 []: rank 1 has not come within 0.2 s"]


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(BadInput, match="at least 1 member, got 0"):
        run_threads(0, lambda group: group.barrier())


def test_alone_is_a_group_of_one() -> None:
    with alone() as group:
        assert (group.rank, group.size, group.ranks) == (0, 1, (0,))
        assert group.all_reduce(np.arange(3)).tolist() == [0, 1, 2]
        assert group.bytes_sent == 0
