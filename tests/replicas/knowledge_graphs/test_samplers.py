"""Batches: triples each where it belongs and once an epoch; candidates of which types, and what is masked."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.contract.arrays import Array, Bools, Int64
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import CORRUPTIONS, Corruption, Negatives, StepBatch
from elastable.replicas.knowledge_graphs.graph.sharding import (
    KnownTriples,
    PartitionedTriples,
    Sharding,
    with_inverses,
)
from elastable.replicas.knowledge_graphs.samplers import (
    AugmentedNegatives,
    RandomNegatives,
    RandomSampler,
    RigidSampler,
    ShardedSampler,
    TypedNegatives,
    frequency_weights,
)
from tests.replicas.knowledge_graphs.graphs import (
    ENTITIES,
    RELATIONS,
    SHARDS,
    TYPE_OFFSETS,
    assembled,
    candidates_of,
    everyones,
    random_triples,
    received,
    replaced_ends,
    type_counts,
    typed_sharding,
)

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


# Candidates: a worker knows what the others draw for it


TRIPLES = random_triples()
SHARDING = typed_sharding()
PARTITION = PartitionedTriples.create(TRIPLES, SHARDING)
KNOWN = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)
TRUE = {tuple(triple) for triple in TRIPLES.tolist()}


def negatives_of(batch: StepBatch) -> Negatives:
    assert batch.negatives is not None
    return batch.negatives


def mask_of(batch: StepBatch) -> Bools:
    """Which candidates count for each of a worker's triples: bool `[n * p, n, m]`."""
    drawn = negatives_of(batch)
    mask = np.ones((1, SHARDS, drawn.rows.shape[2]), np.bool_) if drawn.mask is None else drawn.mask
    return np.broadcast_to(mask, (batch.head.size, *mask.shape[1:]))


def rigid(negatives: RandomNegatives, batch: int = 50) -> RigidSampler:
    return RigidSampler(PARTITION, batch, negatives=negatives)


def known_among(batch: StepBatch, entities: Int64) -> Array:
    """Whether each candidate (int64 `[n * p, n, m]`) makes a known triple."""
    triples = PARTITION.triples[batch.triple].reshape(-1, 3)
    found = np.zeros(entities.shape, np.bool_)
    for b, (triple, end) in enumerate(zip(triples.tolist(), replaced_ends(batch), strict=True)):
        for place in np.ndindex(entities.shape[1:]):
            made = [*triple]
            made[end] = int(entities[b][place])
            found[b][place] = tuple(made) in TRUE
    return found


KINDS: dict[str, Callable[..., RandomNegatives]] = {
    "random": partial(RandomNegatives, SHARDING, 7),
    "random, shared": partial(RandomNegatives, SHARDING, 7, shared=True),
    "random, shared, of 31": partial(RandomNegatives, SHARDING, 7, shared=True, total=31),
    "typed": partial(TypedNegatives, SHARDING, 7),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_true_triples_are_masked_and_nothing_else(kind: str, corruption: Corruption) -> None:
    plain, filtered = (rigid(KINDS[kind](corruption=corruption, known=known), 20) for known in (None, KNOWN))
    met, batches = 0, everyones(filtered, 1)
    for batch, unmasked in zip(batches, everyones(plain, 1), strict=True):
        drawn = negatives_of(batch)
        sets = batch.head.size if drawn.per_triple else len(corruption)
        assert (drawn.rows.dtype, drawn.rows.shape) == (np.int32, (SHARDS, sets, 7))
        np.testing.assert_array_equal(drawn.rows, negatives_of(unmasked).rows)
        excluded = known_among(batch, candidates_of(SHARDING, batches, batch.worker))
        np.testing.assert_array_equal(mask_of(batch), mask_of(unmasked) & ~excluded)
        met += int(excluded.sum())
    assert met


def test_known_answers_are_found_in_long_lists_too() -> None:
    """A hub: 300 tails of one (head, relation), more than there are candidates, and fewer."""
    triples = np.stack([np.full(300, 8), np.zeros(300, int), np.arange(100, 400)], 1)
    partition = PartitionedTriples.create(triples, SHARDING)
    known = KnownTriples.create(ENTITIES, 1, triples)
    for shared, count in ((False, 40), (True, 20), (True, 400)):
        negatives = RandomNegatives(SHARDING, count, corruption="t", shared=shared, known=known)
        batches, worker = everyones(RigidSampler(partition, 25, negatives=negatives), 0), int(SHARDING.shard_of[8])
        entities = candidates_of(SHARDING, batches, worker)
        among = (entities >= 100) & (entities < 400)
        assert 0.4 < among.mean() < 0.8
        np.testing.assert_array_equal(mask_of(batches[worker]), ~among)


def test_typed_candidates_are_of_the_type_they_replace() -> None:
    sampler = rigid(TypedNegatives(SHARDING, 6, corruption="ht"), 60)
    masked = 0
    for step in range(sampler.steps_per_epoch):
        batches = everyones(sampler, step)
        for batch in batches:
            triples = PARTITION.triples[batch.triple].reshape(-1, 3)
            replaced = np.take_along_axis(triples, replaced_ends(batch)[:, None], axis=1)
            wanted = SHARDING.entity_types[replaced][:, None]
            found, mask = SHARDING.entity_types[received(SHARDING, batches, batch.worker)], mask_of(batch)
            np.testing.assert_array_equal((found == wanted)[mask], True)
            has_type = type_counts(SHARDING)[np.arange(SHARDS)[None], wanted[:, 0]] > 0
            np.testing.assert_array_equal(mask, np.broadcast_to(has_type[..., None], found.shape))
            masked += int((~mask).sum())
    assert masked  # one type has one entity: four shards have none of it


def drawn_of(sampler: RigidSampler, steps: int) -> Int64:
    """How often each entity was drawn for a triple, padding left out: int64 `[E]`."""
    drawn, sharding = np.zeros(ENTITIES, np.int64), sampler.partition.sharding
    for step in range(steps):
        batches = everyones(sampler, step)
        for batch in batches:
            counted = mask_of(batch) & batch.mask.reshape(-1, 1, 1)
            entities = candidates_of(sharding, batches, batch.worker)[counted]
            drawn += np.bincount(entities, minlength=ENTITIES)
    return drawn


def test_an_entity_of_several_types_is_replaced_by_entities_of_each() -> None:
    """Entities 0 to 19 are of type 0, and also of type 3 (200 to 340)."""
    further = np.stack([np.arange(20), np.full(20, 3)], axis=1).astype(np.int32)
    triples = np.stack([np.arange(40), np.zeros(40, int), np.full(40, 7)], axis=1)
    negatives = TypedNegatives(SHARDING, 6, corruption="t", further_types=further)
    drawn = drawn_of(RigidSampler(PartitionedTriples.create(triples, SHARDING), 50, negatives=negatives), 20)
    assert not drawn[20:200].any()
    assert not drawn[341:].any()
    assert drawn[:20].min() > 0
    assert drawn[200:341].min() > 0
    # Half of the triples draw type 0, with 20 entities; the others type 3, with 141 and those 20.
    assert drawn[:20].sum() / drawn.sum() == pytest.approx(0.5 + 0.5 * 20 / 161, abs=0.05)


def test_the_last_entity_of_a_type_is_drawn_like_the_others() -> None:
    """The peer's sampling by type never draws it."""
    sampler = rigid(TypedNegatives(SHARDING, 64, corruption="t"), 200)
    drawn = drawn_of(sampler, sampler.steps_per_epoch)
    for begin, end in zip(TYPE_OFFSETS, [*TYPE_OFFSETS[1:], ENTITIES], strict=True):
        of_type = drawn[begin:end]
        assert of_type.min() > 0.8 * of_type.mean()
    assert drawn.min() > 0


def test_random_candidates_are_drawn_evenly_and_never_of_the_padding() -> None:
    sampler = rigid(RandomNegatives(SHARDING, 40, corruption="h"), 50)
    drawn = np.zeros((SHARDS, SHARDING.rows), np.int64)
    for step in range(4):
        for batch in everyones(sampler, step):
            drawn[batch.worker] += np.bincount(negatives_of(batch).rows.reshape(-1), minlength=SHARDING.rows)
    there = SHARDING.entity_at >= 0
    assert not drawn[~there].any()
    # 40,000 draws over 100 rows: 400 each, standard deviation 20
    np.testing.assert_allclose(drawn[there], 400, atol=100)


def _blocks(batches: list[StepBatch]) -> list[tuple[int, ...]]:
    return [tuple(rows.reshape(-1)) for batch in batches for rows in negatives_of(batch).rows]


def test_draws_differ_by_step_and_pair_and_shared_ones_by_step_and_shard() -> None:
    sampler = rigid(RandomNegatives(SHARDING, 20, seed=3), 50)
    blocks = _blocks(everyones(sampler, 0)) + _blocks(everyones(sampler, 1))
    assert len(set(blocks)) == len(blocks) == 2 * SHARDS * SHARDS
    assert _blocks(everyones(rigid(RandomNegatives(SHARDING, 20, seed=4)), 0))[0] not in blocks
    shared = rigid(RandomNegatives(SHARDING, 20, shared=True, seed=3))
    blocks = _blocks(everyones(shared, 0)) + _blocks(everyones(shared, 1))
    assert len(blocks) == 2 * SHARDS * SHARDS
    assert len(set(blocks)) == 2 * SHARDS  # one of each shard in each step: the same for all workers


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("total", [31, 34, 35])
def test_a_total_counts_for_every_triple_and_shards_take_turns(
    total: int, shared: bool, corruption: Corruption
) -> None:
    negatives = RandomNegatives(SHARDING, 7, corruption=corruption, shared=shared, total=total)
    sampler = rigid(negatives, 50)
    padding = np.zeros(SHARDS, np.int64)
    for step in range(SHARDS):
        for batch in everyones(sampler, step):
            mask = negatives_of(batch).mask
            if mask is None:
                assert total == 35
                continue
            assert (mask.sum((1, 2)) == total).all()
            padding += (~mask[0]).sum(1)
    assert len(set(padding)) == 1


NONE = PartitionedTriples.create(TRIPLES[:0], SHARDING)
MISMATCHED: list[tuple[Callable[[], object], str]] = [
    *((partial(kind, NONE, 10), "at least one triple") for kind in SAMPLERS),
    (lambda: RigidSampler(PARTITION, 0), "at least 1 triple a worker"),
    (lambda: RigidSampler(PARTITION, 10, weights=np.ones(3, np.float32)), r"weights must be \[2000\]"),
    (lambda: rigid(RandomNegatives(typed_sharding(seed=2), 1)), "two different shardings"),
    (lambda: RandomSampler(PARTITION, 10).batch(0, 5), "workers are 0"),
    (lambda: RandomNegatives(SHARDING, 0), "at least 1 from each shard"),
    (lambda: RandomNegatives(SHARDING, 1, corruption="th"), "known are h, t, ht"),  # type: ignore[arg-type]
    (lambda: TypedNegatives(SHARDING, 1, shared=True), "cannot be shared"),
    (lambda: TypedNegatives(SHARDING, 1, further_types=np.array([[ENTITIES, 0]], np.int32)), "outside 0 .. 500"),
    (lambda: RandomNegatives(SHARDING, 2, total=5), "5 candidates from 5 shards are not 2 from each"),
    (lambda: RandomNegatives(SHARDING, 2, total=11), "11 candidates from 5 shards are not 2 from each"),
]


@pytest.mark.parametrize(("make", "reason"), MISMATCHED)
def test_mismatched_arguments_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        make()


def test_one_entity_a_worker() -> None:
    sharding = Sharding.create(4, 4, entity_types=[0, 1, 1, 2])
    partition = PartitionedTriples.create([[0, 0, 1], [2, 0, 3]], sharding)
    for negatives in (RandomNegatives(sharding, 3), TypedNegatives(sharding, 3), AugmentedNegatives(sharding, 3)):
        sampler = RigidSampler(partition, 4, negatives=negatives)
        assert len({batch.gathered_rows for batch in everyones(sampler, 0)}) == 1
