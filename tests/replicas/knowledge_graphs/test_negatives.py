"""Candidates: whose rows, of which types, what is masked; and that a worker knows what the others draw for it."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array, Bools, Int64
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.batch import CORRUPTIONS, Corruption, Negatives, StepBatch
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, PartitionedTriples, Sharding
from elastable.replicas.knowledge_graphs.samplers import (
    AugmentedNegatives,
    RandomNegatives,
    RigidSampler,
    TypedNegatives,
)
from tests.replicas.knowledge_graphs.graphs import (
    ENTITIES,
    RELATIONS,
    SHARDS,
    TYPE_OFFSETS,
    candidates_of,
    everyones,
    random_triples,
    received,
    replaced_ends,
    type_counts,
    typed_sharding,
)

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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: RandomNegatives(SHARDING, 0), "at least 1 from each shard"),
        (lambda: RandomNegatives(SHARDING, 1, corruption="th"), "known are h, t, ht"),  # type: ignore[arg-type]
        (lambda: TypedNegatives(SHARDING, 1, shared=True), "cannot be shared"),
        (lambda: RandomNegatives(SHARDING, 2, total=5), "5 candidates from 5 shards are not 2 from each"),
        (lambda: RandomNegatives(SHARDING, 2, total=11), "11 candidates from 5 shards are not 2 from each"),
    ],
)
def test_mismatched_arguments_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        make()


def test_one_entity_a_worker() -> None:
    sharding = Sharding.create(4, 4, entity_types=[0, 1, 1, 2])
    partition = PartitionedTriples.create([[0, 0, 1], [2, 0, 3]], sharding)
    for negatives in (RandomNegatives(sharding, 3), TypedNegatives(sharding, 3), AugmentedNegatives(sharding, 3)):
        sampler = RigidSampler(partition, 4, negatives=negatives)
        assert len({batch.gathered_rows for batch in everyones(sampler, 0)}) == 1
