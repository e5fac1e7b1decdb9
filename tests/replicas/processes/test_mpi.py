"""Groups of processes keep the contract of replica groups; so do exchanges of any lengths."""

from pathlib import Path

import pytest

from tests.contracts.replica_contract import ReplicaContract
from tests.replicas.processes.mpi_run import MEMBERS, run_in_members

CONTRACT = [name for name in dir(ReplicaContract) if name.startswith("test_")]
MORE = [
    "test_a_new_group_can_replace_a_failed_one",
    "test_members_on_several_hosts_meet_by_the_addresses_of_their_hosts",
    "test_a_member_stopped_during_an_exchange_is_named",
    "test_a_member_that_waits_for_another_is_not_blamed",
    "test_a_death_that_mpi_notices_first_is_named",
    "test_uneven_exchanges_are_a_transpose",
    "test_large_payloads_are_sent_in_chunks",
]

Outcomes = dict[str, list[tuple[int, str, str, str]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of all tests in all members, which run them once."""
    return run_in_members(Path(__file__).with_name("in_members.py"), tmp_path_factory.mktemp("members"))


@pytest.mark.parametrize("name", [*CONTRACT, *MORE])
def test_in_every_member(outcomes: Outcomes, name: str) -> None:
    ran = outcomes[name]
    assert {rank for rank, *_ in ran} == set(range(MEMBERS))
    for rank, item, outcome, report in ran:
        assert outcome == "passed", f"{item} on rank {rank}:\n{report}"


def test_nothing_else_was_run(outcomes: Outcomes) -> None:
    assert sorted(outcomes) == sorted([*CONTRACT, *MORE])
