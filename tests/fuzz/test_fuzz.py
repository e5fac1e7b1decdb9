"""A small campaign of every target, that every call of every service is among them, and that fuzzers notice."""

from itertools import pairwise

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from elastable.embedding_store.v1 import store_pb2
from elastable.master.v1 import master_pb2
from tests.fuzz.__main__ import TARGETS
from tests.fuzz.lying_server import PARSERS, MasterReplies, ShardReplies, StoreReplies
from tests.fuzz.master_calls import MASTER_CALLS
from tests.fuzz.mutator import Mutator
from tests.fuzz.sabotage import SABOTAGES, noticed
from tests.fuzz.shard_calls import SHARD_CALLS
from tests.fuzz.store_calls import STORE_CALLS
from tests.fuzz.target import Campaign, Target
from tests.fuzz.wrong_inputs import WrongInputs

LIARS = (StoreReplies, ShardReplies, MasterReplies)
FILES = (store_pb2.DESCRIPTOR, master_pb2.DESCRIPTOR)
CALLS = {"Store": {**STORE_CALLS, **SHARD_CALLS}, "Master": MASTER_CALLS}
SECONDS = 0.25  # the nightly workflow runs `make fuzz` with the seed of the day
GENEROUS = 0.5  # of memory; `make fuzz` holds to a tenth of it, over far more rounds


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_case_ends_without_a_name(target: type[Target]) -> None:
    messages: list[str] = []
    report = Campaign([target], seconds=SECONDS, seed=1, scale=0.3, tell=messages.append).run()
    assert not report.findings, "\n".join(report.findings)
    assert report.cases
    assert report.growth < GENEROUS, [f"{held >> 20} MiB" for held in report.memory]


def test_every_call_of_every_service_is_fuzzed_and_lied_about() -> None:
    """Those of the Store that are not declared are drawn from their fields, and made by the method of their name."""
    services: list[ServiceDescriptor] = [one for file in FILES for one in file.services_by_name.values()]
    assert {service.name for service in services} == set(CALLS)
    for service in services:
        methods = service.methods_by_name
        assert set(CALLS[service.name]) <= set(methods), f"{service.name}: a call too many"
        for name in set(methods) - set(CALLS[service.name]):
            assert service.name == "Store", f"{service.name}: {name} needs to be declared"
            assert not methods[name].client_streaming, f"{service.name}: {name} needs frames to begin with"
        lied = {name for liar in LIARS if liar.service is service for name in liar.questions}
        assert lied == set(methods), service.name


def test_every_frame_is_fuzzed() -> None:
    frames = {
        message.name
        for file in FILES
        for message in file.message_types_by_name.values()
        if [field.name for field in message.fields] == ["header", "body"]
    }
    fuzzed = {call.bulk.DESCRIPTOR.name for call, _ in PARSERS.values() if call.bulk is not None}
    assert frames - {"LookupReply"} == fuzzed  # which servers that lie send


def test_a_seed_gives_the_same_cases() -> None:
    def choices(seed: str) -> list[object]:
        m = Mutator(seed)
        return [m.mutated(bytes(40)), m.text(), m.number(), m.plain(), m.integer(-9, 9)]

    made = [repr(choices(seed)) for seed in ("1/x/0", "1/x/0", "1/x/1", "2/x/0")]
    assert made[0] == made[1]
    assert all(one != other for one, other in pairwise(made[1:]))


class Failing(Target):
    """Finds something at its seventh case, and at every check."""

    name = "failing"
    share = 5

    def case(self, m: Mutator) -> str | None:
        self.outcomes["seen"] += 1
        if self.outcomes["seen"] == 7:
            raise KeyError("without a name")
        return None

    def check(self) -> None:
        raise RuntimeError("the server is gone")


def test_what_is_found_is_reported_with_how_to_see_it_again() -> None:
    report = Campaign([Failing], cases=12, seed=5).run()
    assert report.cases == 12
    assert "--seed 5 --only failing --first 6 --cases 1" in report.findings[0]
    assert "KeyError: 'without a name'" in report.findings[0]
    assert "the server is gone" in report.findings[1]
    assert len(report.findings) == 2


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_check_that_is_taken_out_is_noticed(name: str) -> None:
    sabotage = SABOTAGES[name]
    findings = noticed(sabotage).findings
    assert any(f"accepted, with {sabotage.flaw}" in finding for finding in findings), findings


def test_every_fuzzer_of_wrong_inputs_has_a_check_to_notice() -> None:
    assert {sabotage.target for sabotage in SABOTAGES.values()} == set(WrongInputs.__subclasses__())
