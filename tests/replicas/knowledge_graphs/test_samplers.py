"""Batches of triples: each where it belongs, each once an epoch, the same number of rows on every worker."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import StepBatch
from elastable.replicas.knowledge_graphs.graph.sharding import PartitionedTriples, Sharding, with_inverses
from elastable.replicas.knowledge_graphs.samplers import (
    RandomNegatives,
    RandomSampler,
    RigidSampler,
    ShardedSampler,
    frequency_weights,
)
from tests.replicas.knowledge_graphs.graphs import RELATIONS, assembled, everyones, random_triples, typed_sharding

SAMPLERS = [RigidSampler, RandomSampler]


def partitioned(shards: int = 5, count: int = 2000) -> PartitionedTriples:
    return PartitionedTriples.create(random_triples(count), typed_sharding(shards))


def equal(one: StepBatch, other: StepBatch) -> bool:
    arrays = ("head", "relation", "tail", "triple", "mask", "weight")
    rows = [[] if batch.negatives is None else batch.negatives.rows for batch in (one, other)]  # type: ignore[var-annotated]
    return np.array_equal(*rows) and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_workers_assemble_the_triples_that_the_batch_names(kind: type[ShardedSampler], shards: int) -> None:
    partition = partitioned(shards)
    sampler = kind(partition, 64, seed=3)
    for step in (0, 1, sampler.steps_per_epoch):
        batches = everyones(sampler, step)
        named = np.stack([partition.triples[batch.triple] for batch in batches])
        np.testing.assert_array_equal(assembled(partition, batches), named)
        shard_of = partition.sharding.shard_of
        for worker, batch in enumerate(batches):
            assert (shard_of[named[worker, ..., 0]] == worker).all()
            assert (shard_of[named[worker, ..., 2]] == np.arange(shards)[:, None]).all()
            assert batch.present == sum(int(other.mask.sum()) for other in batches)
            assert (batch.weight > 0).tolist() == batch.mask.tolist()


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("corruption", ["t", "ht"])
def test_every_worker_gathers_the_same_number_of_rows_in_every_step(
    kind: type[ShardedSampler], corruption: str
) -> None:
    partition = partitioned()
    sampler = kind(partition, 47, negatives=RandomNegatives(partition.sharding, 3, corruption=corruption))  # type: ignore[arg-type]
    shapes = set()
    for step in range(2 * sampler.steps_per_epoch + 1):
        for batch in everyones(sampler, step):
            assert batch.negatives is not None
            shapes.add((batch.head.shape, batch.tail.shape, batch.negatives.rows.shape, batch.gathered_rows))
            assert batch.negatives.rows.max() < partition.sharding.counts[batch.worker]
    block = 10  # 47 / 5, rounded up; even already
    assert shapes == {((5, block), (5, block), (5, 5 * block, 3), 2 * 5 * block + 5 * 5 * block * 3)}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 90), st.booleans(), st.integers(1, 300))
def test_a_rigid_epoch_meets_every_triple_once(shards: int, batch: int, both_ends: bool, count: int) -> None:
    partition = partitioned(shards, count)
    negatives = RandomNegatives(partition.sharding, 1, corruption="ht" if both_ends else "h")
    sampler = RigidSampler(partition, batch, seed=1, negatives=negatives)
    for epoch in range(2):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        batches = [part for step in steps for part in everyones(sampler, step)]
        met = np.concatenate([part.triple[part.mask] for part in batches])
        np.testing.assert_array_equal(np.sort(met), np.arange(count))
        assert sum(part.present for part in batches) == count * shards  # reported by every worker


def test_a_rigid_epoch_is_spread_evenly_and_its_orders_differ() -> None:
    partition = partitioned()
    sampler = RigidSampler(partition, 40, seed=1)
    present = [sampler.batch(step, 0).present for step in range(sampler.steps_per_epoch)]
    assert sum(present) == len(partition)
    assert max(present) - min(present) <= 25  # at most one triple of each of 25 pairs
    again = RigidSampler(partition, 40, seed=1)
    other = RigidSampler(partition, 40, seed=2)
    first, next_epoch = sampler.batch(0, 0), sampler.batch(sampler.steps_per_epoch, 0)
    assert equal(first, again.batch(0, 0))
    assert not np.array_equal(first.triple, other.batch(0, 0).triple)
    assert not np.array_equal(first.triple, next_epoch.triple)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_run_resumes_at_its_step(kind: type[ShardedSampler]) -> None:
    """A position is one number: batches of a new sampler, made from there, are those of the old one."""
    partition = partitioned()

    def sampler() -> ShardedSampler:
        return kind(partition, 30, seed=5, negatives=RandomNegatives(partition.sharding, 4, seed=6))

    whole, resumed = sampler(), sampler()
    went_on = [whole.batch(step, 2) for step in range(2 * whole.steps_per_epoch)]
    for step in (len(went_on) // 3, len(went_on) - 1):
        assert equal(resumed.batch(step, 2), went_on[step])


def test_both_ends_are_corrupted_equally_often() -> None:
    partition = partitioned()
    sampler = RigidSampler(partition, 47, negatives=RandomNegatives(partition.sharding, 1, corruption="ht"))
    heads = tails = 0
    for step in range(sampler.steps_per_epoch):
        for batch in everyones(sampler, step):
            halves = batch.mask.reshape(5, 2, -1).sum(axis=(0, 2))
            heads, tails = heads + int(halves[0]), tails + int(halves[1])
            assert (np.abs(np.diff(batch.mask.reshape(5, 2, -1).sum(-1))) <= 1).all()
    assert heads + tails == len(partition)
    assert abs(heads - tails) < 25


@pytest.mark.parametrize("kind", SAMPLERS)
def test_empty_shardpairs_are_padding(kind: type[ShardedSampler]) -> None:
    """The peer divides by zero there."""
    sharding = Sharding.create(12, 3)
    head, tail = sharding.entity_at[0, 1], sharding.entity_at[2, 3]
    partition = PartitionedTriples.create([[head, 1, tail]], sharding)
    sampler = kind(partition, 6, negatives=RandomNegatives(sharding, 2))
    batches = everyones(sampler, 0)
    assert {batch.gathered_rows for batch in batches} == {2 * 3 * 2 + 3 * 6 * 2}
    for batch in batches:
        full = np.zeros((3, 2), np.bool_)
        full[2] = batch.worker == 0
        np.testing.assert_array_equal(batch.triple, np.where(full, 0, -1))
        assert (batch.mask <= full).all()
        assert batch.present == (1 if kind is RigidSampler else 2)
        assert not batch.weight[~full].any()
        for array in (batch.head, batch.relation):
            assert not array[~full].any()
    np.testing.assert_array_equal(assembled(partition, batches)[0, 2], [[head, 1, tail]] * 2)


def test_random_draws_make_up_for_the_sizes_of_pairs() -> None:
    """Expected: every triple's share of all weight drawn is 1 / N, whatever pair it is of."""
    partition = partitioned(3, 60)
    sampler = RandomSampler(partition, 30, seed=0)
    weight = np.zeros(len(partition))
    for step in range(600):
        for batch in everyones(sampler, step):
            np.add.at(weight, batch.triple.reshape(-1), batch.weight.reshape(-1))
    drawn = 600 * 90
    assert abs(weight.sum() / drawn - 1) < 1e-6
    # 6000 draws of each pair, of up to 12 triples: five standard deviations of 500 draws are 22 %.
    np.testing.assert_allclose(weight / drawn * len(partition), 1, atol=0.22)
    for shard in np.ndindex(3, 3):
        begin, count = partition.offsets[shard], partition.counts[shard]
        np.testing.assert_allclose(weight[begin : begin + count].sum() / drawn, count / len(partition), rtol=1e-5)


def test_frequency_weights_by_hand() -> None:
    """Counts of (h, r): 2, 2, 1, 1; of (r, t): 1, 2, 2, 1; so shared 3, 4, 3, 2."""
    triples = np.array([[0, 0, 1], [0, 0, 2], [3, 0, 2], [0, 1, 2]], np.int32)
    raw = 1 / np.sqrt([3.0, 4.0, 3.0, 2.0])
    np.testing.assert_allclose(frequency_weights(triples), raw / raw.mean(), rtol=1e-6)
    assert frequency_weights(triples[:0]).shape == (0,)


def test_weights_do_not_depend_on_the_number_of_shards() -> None:
    """The peer counts local ids, so that its weights change with n."""
    triples = with_inverses(random_triples(), RELATIONS)
    by_source = []
    for shards in (1, 3, 5):
        partition = PartitionedTriples.create(triples, typed_sharding(shards))
        sampler = RigidSampler(partition, 50, weights=frequency_weights(partition.triples))
        met = np.zeros(len(triples), np.float32)
        for step in range(sampler.steps_per_epoch):
            for batch in everyones(sampler, step):
                met[partition.source[batch.triple[batch.mask]]] = batch.weight[batch.mask]
        by_source.append(met)
    np.testing.assert_array_equal(by_source[0], by_source[1])
    np.testing.assert_array_equal(by_source[0], by_source[2])
    np.testing.assert_array_equal(by_source[0], frequency_weights(triples))
    assert np.unique(by_source[0]).size > 2


@pytest.mark.parametrize("kind", SAMPLERS)
def test_mismatched_arguments_are_refused(kind: type[ShardedSampler]) -> None:
    triples, sharding = random_triples(), typed_sharding()
    partition = partitioned()
    with pytest.raises(BadInput, match="at least one triple"):
        kind(PartitionedTriples.create(triples[:0], sharding), 10)
    with pytest.raises(BadInput, match="at least 1 triple a worker"):
        kind(partition, 0)
    with pytest.raises(BadInput, match=r"weights must be \[2000\]"):
        kind(partition, 10, weights=np.ones(3, np.float32))
    with pytest.raises(BadInput, match="two different shardings"):
        kind(partition, 10, negatives=RandomNegatives(typed_sharding(seed=2), 1))
    with pytest.raises(BadInput, match="workers are 0"):
        kind(partition, 10).batch(0, 5)
