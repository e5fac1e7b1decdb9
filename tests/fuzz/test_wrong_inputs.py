"""The fuzzers that look for input wrongly accepted notice each check that is taken out."""

import pytest

from tests.fuzz.sabotage import SABOTAGES, noticed
from tests.fuzz.wrong_inputs import WRONG_INPUTS


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_check_that_is_taken_out_is_noticed(name: str) -> None:
    sabotage = SABOTAGES[name]
    findings = noticed(sabotage).findings
    assert any(f"accepted, with {sabotage.flaw}" in finding for finding in findings), findings


def test_every_fuzzer_has_a_check_to_notice() -> None:
    assert {sabotage.target for sabotage in SABOTAGES.values()} == set(WRONG_INPUTS)
