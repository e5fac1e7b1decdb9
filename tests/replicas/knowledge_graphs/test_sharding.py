"""Shards are even, also by type, and are saved; triples are grouped by the shards of their ends."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph.sharding import (
    PartitionedTriples,
    Sharding,
    with_inverses,
)
from tests.replicas.knowledge_graphs.graphs import (
    ENTITIES,
    RELATIONS,
    SHARDS,
    random_triples,
    type_counts,
    typed_sharding,
)


@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 5), st.integers(-3, 2**63))
def test_any_sharding_is_even_and_can_be_undone(entities: int, shards: int, kinds: int, seed: int) -> None:
    shards = min(shards, entities)
    types = np.random.default_rng(seed & 0xFFFF).integers(kinds, size=entities) if kinds else None
    sharding = Sharding.create(entities, shards, seed=seed, entity_types=types)
    assert sharding.counts.max() - sharding.counts.min() <= 1
    assert sharding.rows == sharding.counts.max() == -(-entities // shards)
    assert (type_counts(sharding).max(0) - type_counts(sharding).min(0) <= 1).all()
    for shard in range(shards):
        held = sharding.held_by(shard)
        np.testing.assert_array_equal(sharding.shard_of[held], shard)
        np.testing.assert_array_equal(sharding.row_of[held], np.arange(len(held)))
        assert (sharding.entity_at[shard, len(held) :] == -1).all()
        if types is not None:  # each type in contiguous rows
            np.testing.assert_array_equal(
                types[held], np.repeat(np.arange(types.max() + 1), type_counts(sharding)[shard])
            )
    table = np.random.default_rng(0).normal(size=(entities, 3))
    parts = np.stack([sharding.shard_table(table, shard) for shard in range(shards)])
    assert parts.shape == (shards, sharding.rows, 3)
    np.testing.assert_array_equal(sharding.whole_table(parts), table)


def test_the_seed_decides() -> None:
    assert typed_sharding(seed=4) == typed_sharding(seed=4)
    assert typed_sharding(seed=4) != typed_sharding(seed=5)


def test_saved_with_a_run(tmp_path: Path) -> None:
    sharding = typed_sharding()
    sharding.save(tmp_path / "sharding.npz")
    with np.load(tmp_path / "sharding.npz") as saved:
        assert (saved["format"], saved["seed"], saved["shards"]) == (1, sharding.seed, sharding.shards)
        for name in ("shard_of", "row_of", "entity_types"):
            np.testing.assert_array_equal(saved[name], getattr(sharding, name))
    assert [path.name for path in tmp_path.iterdir()] == ["sharding.npz"]


def test_more_workers_than_entities_are_refused() -> None:
    with pytest.raises(BadInput, match="3 entities cannot be spread over 4 workers"):
        Sharding.create(3, 4)
    with pytest.raises(BadInput, match="at least 1"):
        Sharding.create(3, 0)


@pytest.mark.parametrize("types", [[0, 1], [0.0, 1.0, 2.0], [0, 1, -1], [[0, 1, 2]]])
def test_malformed_types_are_refused(types: list[int]) -> None:
    with pytest.raises(BadInput, match="entity types"):
        Sharding.create(3, 1, entity_types=types)


def test_every_triple_lies_in_its_group() -> None:
    triples, sharding = random_triples(), typed_sharding()
    partition = PartitionedTriples.create(triples, sharding)
    np.testing.assert_array_equal(triples[partition.source], partition.triples)
    np.testing.assert_array_equal(np.sort(partition.source), np.arange(len(triples)))
    assert partition.counts.shape == partition.offsets.shape == (SHARDS, SHARDS)
    for group in np.ndindex(partition.counts.shape):
        begin = partition.offsets[group]
        mine = slice(begin, begin + partition.counts[group])
        assert (np.diff(partition.source[mine]) > 0).all()  # in their order
        ends = partition.triples[mine][:, [0, 2]]
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
    with pytest.raises(BadInput, match="relation 10 is not one of 10"):
        with_inverses(triples, RELATIONS - 1)


def test_no_triples_and_empty_shardpairs() -> None:
    sharding = Sharding.create(6, 3)
    none = PartitionedTriples.create(np.empty((0, 3), np.int64), sharding)
    assert len(none) == 0
    assert none.counts.sum() == 0
    first, second = sharding.entity_at[0, 0], sharding.entity_at[2, 1]
    one = PartitionedTriples.create([[first, 0, second]], sharding)
    assert one.counts[0, 2] == one.counts.sum() == 1


@pytest.mark.parametrize(
    ("triples", "reason"),
    [
        ([[0, 0, 0], [ENTITIES, 0, 0]], f"triple 1: head {ENTITIES} is not one of {ENTITIES} entities"),
        ([[3, 0, -1]], "triple 0: tail -1"),
        ([[0, -1, 0]], "triple 0: relation -1"),
        ([[0.0, 1.0, 2.0]], "integers"),
        ([[0, 1]], "integers"),
    ],
)
def test_malformed_triples_are_refused(triples: object, reason: str) -> None:
    with pytest.raises((BadInput, IdOutOfRange), match=reason):
        PartitionedTriples.create(triples, typed_sharding())  # type: ignore[arg-type]
