"""Specs survive JSON without loss."""

import json

import pytest

from elastable.embedding_store.contract.spec import (
    AdmissionSpec,
    EvictionSpec,
    ShardOrigin,
    TableSpec,
    spec_from_json,
    spec_to_json,
)
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.wire.messages.store_messages import spec_from_message, spec_to_message


def test_a_shard_of_a_shard_comes_back_as_it_was() -> None:
    whole = TableSpec("t", 8, admission=AdmissionSpec(3), eviction=EvictionSpec(max_rows=9))
    half = TableSpec("t", 4, origin=ShardOrigin(1, 0, 4, whole, 2))
    third = TableSpec("t", 4, origin=ShardOrigin(3, 2, 4, half, 3))
    for spec in (whole, half, third, TableSpec("t", 4, origin=ShardOrigin(5, 1))):
        assert spec_from_json(spec_to_json(spec)) == spec
        assert spec_from_message(spec_to_message(spec)) == spec
    assert (whole.whole, half.whole, third.whole) == (whole, whole, whole)


def test_eviction_by_time_comes_back_and_the_others_read_as_they_were_written_before_it() -> None:
    timed = TableSpec("t", 8, eviction=EvictionSpec(ttl=3600, every=7))
    assert spec_from_json(spec_to_json(timed)) == timed
    assert spec_from_message(spec_to_message(timed)) == timed
    assert spec_to_json(timed) == spec_to_json(TableSpec("t", 8, eviction=EvictionSpec(ttl=3600.0, every=7)))
    before = '"eviction": {"every": 1, "max_age": null, "max_rows": 9, "min_frequency": null}'
    aged = TableSpec("t", 8, eviction=EvictionSpec(max_rows=9))
    assert before in spec_to_json(aged)
    assert spec_from_json(spec_to_json(aged)) == aged


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf"), 2.0**31, "1h"])
def test_a_time_to_live_that_cannot_be_is_refused(ttl: float) -> None:
    with pytest.raises(BadSpec, match=r"eviction: ttl must lie from 0.001 to 2\*\*31 seconds"):
        EvictionSpec(ttl=ttl)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "t"}', '{"optimizer": 3}'])
def test_what_is_no_spec(text: str) -> None:
    with pytest.raises(BadSpec, match="no table spec"):
        spec_from_json(text)


@pytest.mark.parametrize("field", ["name", "keras_config"])
def test_a_list_in_place_of_a_value_is_no_spec(field: str) -> None:
    fields = json.loads(spec_to_json(TableSpec("t", 8)))
    fields["optimizer"][field] = [fields["optimizer"][field]]
    with pytest.raises(BadSpec, match="no table spec"):
        spec_from_json(json.dumps(fields))


@pytest.mark.parametrize(("dim", "size"), [(True, None), (4, True)])
def test_a_boolean_is_no_number(dim: int, size: int | None) -> None:
    with pytest.raises(BadSpec, match=r"table 't': (dim|vocabulary_size) must be .*integer.*, got True"):
        TableSpec("t", dim, size)
