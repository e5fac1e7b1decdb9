"""Triples by the shards of their ends; inverse triples (ORACLES: shardpair counts are C + its transpose)."""

from __future__ import annotations

import numpy as np
import pytest

from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph import (
    PartitionedTriples,
    PartitionMode,
    Sharding,
    with_inverses,
)
from tests.replicas.knowledge_graphs.graphs import ENTITIES, RELATIONS, SHARDS, random_triples, typed_sharding


@pytest.mark.parametrize("mode", ["pair", "head", "tail"])
def test_every_triple_lies_in_its_group(mode: PartitionMode) -> None:
    triples, sharding = random_triples(), typed_sharding()
    partition = PartitionedTriples.create(triples, sharding, mode)
    np.testing.assert_array_equal(triples[partition.source], partition.triples)
    np.testing.assert_array_equal(np.sort(partition.source), np.arange(len(triples)))
    assert partition.counts.shape == partition.offsets.shape == ((SHARDS, SHARDS) if mode == "pair" else (SHARDS,))
    for group in np.ndindex(partition.counts.shape):
        begin = partition.offsets[group]
        mine = slice(begin, begin + partition.counts[group])
        assert (np.diff(partition.source[mine]) > 0).all()  # in their order
        ends = partition.triples[mine][:, {"pair": [0, 2], "head": [0], "tail": [2]}[mode]]
        np.testing.assert_array_equal(sharding.shard_of[ends], np.broadcast_to(group, ends.shape))


def test_inverse_triples() -> None:
    triples, sharding = random_triples(), typed_sharding()
    both = with_inverses(triples, RELATIONS)
    assert both.shape == (2 * len(triples), 3)
    np.testing.assert_array_equal(both[: len(triples)], triples)
    np.testing.assert_array_equal(both[len(triples) :, [2, 0]], triples[:, [0, 2]])
    np.testing.assert_array_equal(both[len(triples) :, 1], triples[:, 1] + RELATIONS)
    counts = PartitionedTriples.create(triples, sharding).counts
    assert (counts != counts.T).any()
    np.testing.assert_array_equal(PartitionedTriples.create(both, sharding).counts, counts + counts.T)
    with pytest.raises(IdOutOfRange, match=r"not in 0 \.\. 9"):
        with_inverses(triples, RELATIONS - 1)


def test_no_triples_and_empty_shardpairs() -> None:
    sharding = Sharding.create(6, 3)
    none = PartitionedTriples.create(np.empty((0, 3), np.int64), sharding)
    assert len(none) == 0
    assert none.counts.sum() == 0
    first, second = sharding.entity_at[0, 0], sharding.entity_at[2, 1]
    one = PartitionedTriples.create([[first, 0, second]], sharding)
    assert one.counts[0, 2] == one.counts.sum() == 1


def test_the_queried_end_may_be_unknown() -> None:
    sharding = typed_sharding()
    asked = np.array([[3, 0, -1], [400, 2, -1]])
    by_head = PartitionedTriples.create(asked, sharding, "head")
    assert by_head.counts.sum() == 2
    with pytest.raises(IdOutOfRange, match="triple 0: tail -1"):
        PartitionedTriples.create(asked, sharding, "tail")
    with pytest.raises(IdOutOfRange, match="triple 0: tail -1"):
        PartitionedTriples.create(asked, sharding)


def test_malformed_triples_are_refused() -> None:
    sharding = typed_sharding()
    with pytest.raises(IdOutOfRange, match=f"triple 1: head {ENTITIES} is not one of {ENTITIES} entities"):
        PartitionedTriples.create([[0, 0, 0], [ENTITIES, 0, 0]], sharding)
    with pytest.raises(BadInput, match="triple 0: relation -1"):
        PartitionedTriples.create([[0, -1, 0]], sharding)
    with pytest.raises(BadInput, match="integers"):
        PartitionedTriples.create([[0.0, 1.0, 2.0]], sharding)
    with pytest.raises(BadInput, match="integers"):
        PartitionedTriples.create([[0, 1]], sharding)
    with pytest.raises(BadInput, match="known are pair, head, tail"):
        PartitionedTriples.create([[0, 1, 2]], sharding, "both")  # type: ignore[arg-type]
