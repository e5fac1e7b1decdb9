"""Groups of processes keep the contract of replica groups; so do exchanges of any lengths."""

import re
from pathlib import Path

import pytest

from tests.contracts.replica_contract import ReplicaContract
from tests.replicas.groups.mpi_run import MEMBERS, run_in_members

IN_MEMBERS = Path(__file__).with_name("in_members.py")
CONTRACT = [name for name in dir(ReplicaContract) if name.startswith("test_")]
MORE = re.findall(r"^def (test_\w+)", IN_MEMBERS.read_text(), re.MULTILINE)

Outcomes = dict[str, list[tuple[int, str, str, str]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of all tests in all members, which run them once."""
    return run_in_members(IN_MEMBERS, tmp_path_factory.mktemp("members"))


@pytest.mark.parametrize("name", [*CONTRACT, *MORE])
def test_in_every_member(outcomes: Outcomes, name: str) -> None:
    ran = outcomes[name]
    assert {rank for rank, *_ in ran} == set(range(MEMBERS))
    for rank, item, outcome, report in ran:
        assert outcome == "passed", f"{item} on rank {rank}:\n{report}"


def test_nothing_else_was_run(outcomes: Outcomes) -> None:
    assert sorted(outcomes) == sorted([*CONTRACT, *MORE])
