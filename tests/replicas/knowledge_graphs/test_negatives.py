"""Candidates: whose rows, of which types, what is masked; and that a worker knows what the others draw for it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.graph.batch import CORRUPTIONS, Corruption, StepBatch
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, PartitionedTriples, Sharding
from elastable.replicas.knowledge_graphs.negatives import AllEntities, NegativeSampler, TripleNegatives
from elastable.replicas.knowledge_graphs.samplers import RandomNegatives, RigidSampler, TypedNegatives
from tests.replicas.knowledge_graphs.graphs import (
    ENTITIES,
    RELATIONS,
    SHARDS,
    TYPE_OFFSETS,
    everyones,
    random_triples,
    type_counts,
    typed_sharding,
)

TRIPLES = random_triples()
SHARDING = typed_sharding()
PARTITION = PartitionedTriples.create(TRIPLES, SHARDING)
KNOWN = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)
TRUE = {tuple(triple) for triple in TRIPLES.tolist()}


def negatives_of(batch: StepBatch) -> Any:
    assert batch.negatives is not None
    return batch.negatives


def rigid(negatives: NegativeSampler, batch: int = 50) -> RigidSampler:
    return RigidSampler(PARTITION, batch, negatives=negatives)


def received(batches: list[StepBatch], worker: int) -> Int64:
    """What a worker's triples are scored with after the all-to-all, from the rows alone: int64 `[B, n, m]`."""
    entity_at = SHARDING.entity_at
    parts = [batches[worker] if negatives_of(batches[worker]).local else batch for batch in batches]
    rows = [negatives_of(part).rows[shard if negatives_of(part).local else worker] for shard, part in enumerate(parts)]
    return np.stack([entity_at[part.worker][row] for part, row in zip(parts, rows, strict=True)], axis=1)


def ends(batch: StepBatch, corruption: Corruption) -> Int64:
    """0: the head of a triple is replaced, 2: its tail; int64 `[n * p]`."""
    n, p = batch.head.shape
    k = np.arange(n * p) % p
    return {"h": 0 * k, "t": 2 + 0 * k, "ht": np.where(k < p // 2, 0, 2)}[corruption]


def candidates(batch: StepBatch, received: Int64) -> Int64:
    """The entities that each of a worker's triples is scored with, int64 `[n * p, n, m]`."""
    negatives = negatives_of(batch)
    if negatives.per_triple:
        return received
    sets = ends(batch, negatives.corruption) // 2 if len(received) == 2 else np.zeros(batch.head.size, np.int64)
    return received[sets]


def made(batch: StepBatch, entities: Int64, corruption: Corruption) -> Int64:
    """The triples that candidates make: int64 `[n * p, n, m, 3]`."""
    triples = np.broadcast_to(PARTITION.triples[batch.triple].reshape(-1, 1, 1, 3), (*entities.shape, 3)).astype(
        np.int64
    )
    which = np.broadcast_to(ends(batch, corruption)[:, None, None, None], (*entities.shape, 1))
    np.put_along_axis(triples, which, entities[..., None], axis=-1)
    return triples


def known_among(triples: Int64) -> Array:
    return np.array([tuple(triple) in TRUE for triple in triples.reshape(-1, 3).tolist()]).reshape(triples.shape[:-1])


def kinds() -> list[tuple[str, object]]:
    lists = np.random.default_rng(2).integers(ENTITIES, size=(2, len(TRIPLES), 9))
    return [
        ("random", partial(RandomNegatives, SHARDING, 7)),
        ("random, local", partial(RandomNegatives, SHARDING, 7, local=True)),
        ("random, shared", partial(RandomNegatives, SHARDING, 7, shared=True)),
        ("random, shared, local", partial(RandomNegatives, SHARDING, 7, shared=True, local=True)),
        ("typed", partial(TypedNegatives, SHARDING, 7)),
        ("typed, local", partial(TypedNegatives, SHARDING, 7, local=True)),
        ("listed", partial(TripleNegatives, SHARDING, heads=lists[0], tails=lists[1])),
        ("listed, shared", partial(TripleNegatives, SHARDING, heads=lists[0, 0], tails=lists[1, 0])),
        ("all", partial(AllEntities, SHARDING)),
    ]


every_kind = pytest.mark.parametrize("make", [make for _, make in kinds()], ids=[name for name, _ in kinds()])
every_corruption = pytest.mark.parametrize("corruption", CORRUPTIONS)


@every_kind
@every_corruption
def test_a_worker_knows_what_it_receives(make: Callable[..., NegativeSampler], corruption: Corruption) -> None:
    sampler = rigid(make(corruption=corruption, exclude="nothing", tell_entities=True), 30)
    for step in (0, 3):
        batches = everyones(sampler, step)
        for batch in batches:
            negatives = negatives_of(batch)
            assert negatives.rows.dtype == np.int32
            sets = batch.head.size if negatives.per_triple else 2 if corruption == "ht" else 1
            assert negatives.rows.shape[:2] == (SHARDS, 1 if isinstance(sampler.negatives, AllEntities) else sets)
            got = received(batches, batch.worker)
            there = negatives.entities >= 0
            np.testing.assert_array_equal(negatives.entities[there], got[there])
            if negatives.mask is None:
                assert there.all()
            else:  # nothing but padding is masked
                everyone = np.broadcast_to(negatives.mask, (batch.head.size, *negatives.mask.shape[1:]))
                np.testing.assert_array_equal(everyone, candidates(batch, there))


@every_kind
@every_corruption
@pytest.mark.parametrize("exclude", ["answer", "known"])
def test_true_triples_are_masked_and_nothing_else(
    make: Callable[..., NegativeSampler], corruption: Corruption, exclude: str
) -> None:
    sampler = rigid(make(corruption=corruption, exclude=exclude, known=KNOWN), 20)
    met = 0
    batches = everyones(sampler, 1)
    plain = everyones(RigidSampler(PARTITION, 20, negatives=make(corruption=corruption, exclude="nothing")), 1)
    for batch, unmasked in zip(batches, plain, strict=True):
        triples = made(batch, candidates(batch, received(batches, batch.worker)), corruption)
        own = (triples == PARTITION.triples[batch.triple].reshape(-1, 1, 1, 3)).all(-1)
        excluded = own if exclude == "answer" else known_among(triples)
        there = True if negatives_of(unmasked).mask is None else negatives_of(unmasked).mask
        np.testing.assert_array_equal(negatives_of(batch).mask, there & ~excluded)
        met += int(excluded.sum())
    assert met or not isinstance(sampler.negatives, AllEntities)


def test_known_answers_are_found_in_long_lists_too() -> None:
    """A hub: 300 tails of one (head, relation), more than there are candidates, and fewer."""
    triples = np.stack([np.full(300, 8), np.zeros(300, int), np.arange(100, 400)], 1)
    partition = PartitionedTriples.create(triples, SHARDING)
    known = KnownTriples.create(ENTITIES, 1, triples)
    for shared, count in ((False, 40), (True, 20), (True, 400)):
        negatives = RandomNegatives(
            SHARDING, count, corruption="t", shared=shared, exclude="known", known=known, tell_entities=True
        )
        batch = RigidSampler(partition, 25, negatives=negatives).batch(0, int(SHARDING.shard_of[8]))
        among = (negatives_of(batch).entities >= 100) & (negatives_of(batch).entities < 400)
        assert 0.4 < among.mean() < 0.8
        np.testing.assert_array_equal(negatives_of(batch).mask, np.broadcast_to(~among, negatives_of(batch).mask.shape))


@pytest.mark.parametrize("local", [False, True])
def test_typed_candidates_are_of_the_type_they_replace(local: bool) -> None:
    negatives = TypedNegatives(SHARDING, 6, corruption="ht", local=local)
    sampler = rigid(negatives, 60)
    masked = 0
    for step in range(sampler.steps_per_epoch):
        batches = everyones(sampler, step)
        for batch in batches:
            replaced = np.take_along_axis(
                PARTITION.triples[batch.triple].reshape(-1, 3), ends(batch, "ht")[:, None], axis=1
            )
            wanted = SHARDING.entity_types[replaced][:, None]
            found = SHARDING.entity_types[received(batches, batch.worker)]
            np.testing.assert_array_equal((found == wanted)[negatives_of(batch).mask], True)
            shards = np.full(SHARDS, batch.worker) if local else np.arange(SHARDS)
            has_type = type_counts(SHARDING)[shards[None], wanted[:, 0]] > 0
            np.testing.assert_array_equal(negatives_of(batch).mask, np.broadcast_to(has_type[..., None], found.shape))
            masked += int((~negatives_of(batch).mask).sum())
    assert masked  # one type has one entity: four shards have none of it


def test_an_entity_of_several_types_is_replaced_by_entities_of_each() -> None:
    """Entities 0 to 19 are of type 0, and also of type 3 (200 to 340)."""
    further = np.stack([np.arange(20), np.full(20, 3)], axis=1).astype(np.int32)
    triples = np.stack([np.arange(40), np.zeros(40, int), np.full(40, 7)], axis=1)
    negatives = TypedNegatives(SHARDING, 6, corruption="t", tell_entities=True, further_types=further)
    sampler = RigidSampler(PartitionedTriples.create(triples, SHARDING), 50, negatives=negatives)
    drawn = np.zeros(ENTITIES, np.int64)
    for step in range(20):
        for batch in everyones(sampler, step):
            found = negatives_of(batch).entities.reshape(batch.head.size, -1)[batch.mask.reshape(-1)]
            drawn += np.bincount(found.reshape(-1), minlength=ENTITIES)
    assert not drawn[20:200].any()
    assert not drawn[341:].any()
    assert drawn[:20].min() > 0
    assert drawn[200:341].min() > 0
    # Half of the triples draw type 0, with 20 entities; the others type 3, with 141 and those 20.
    assert drawn[:20].sum() / drawn.sum() == pytest.approx(0.5 + 0.5 * 20 / 161, abs=0.05)


def test_the_last_entity_of_a_type_is_drawn_like_the_others() -> None:
    """The peer's sampling by type never draws it."""
    negatives = TypedNegatives(SHARDING, 64, corruption="t", tell_entities=True)
    sampler = rigid(negatives, 200)
    drawn = np.zeros(ENTITIES, np.int64)
    for step in range(sampler.steps_per_epoch):
        for batch in everyones(sampler, step):
            entities = negatives_of(batch).entities[negatives_of(batch).mask & (negatives_of(batch).entities >= 0)]
            drawn += np.bincount(entities, minlength=ENTITIES)
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


@every_corruption
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


def test_listed_candidates_are_all_of_the_list() -> None:
    lists = np.random.default_rng(5).integers(-1, ENTITIES, size=(2, len(TRIPLES), 9))
    negatives = TripleNegatives(SHARDING, heads=lists[0], tails=lists[1], tell_entities=True)
    sampler = rigid(negatives, 30)
    for batch in everyones(sampler, 2):
        source = PARTITION.source[batch.triple.reshape(-1)]
        wanted = np.where(ends(batch, "ht")[:, None] == 0, lists[0][source], lists[1][source])
        found = np.sort(negatives_of(batch).entities.reshape(len(wanted), -1), axis=1)  # -1 at padding
        np.testing.assert_array_equal(found[:, -wanted.shape[1] :], np.sort(wanted, axis=1))
        assert (found[:, : -wanted.shape[1]] == -1).all()
        np.testing.assert_array_equal(negatives_of(batch).mask, negatives_of(batch).entities >= 0)


def test_all_entities_are_every_row_once() -> None:
    batch = rigid(AllEntities(SHARDING, tell_entities=True), 10).batch(0, 1)
    negatives = negatives_of(batch)
    np.testing.assert_array_equal(negatives.rows[:, 0], np.tile(np.arange(SHARDING.rows), (SHARDS, 1)))
    np.testing.assert_array_equal(np.sort(negatives.entities[negatives.entities >= 0]), np.arange(ENTITIES))
    assert (negatives.mask.sum((1, 2)) == ENTITIES - 1).all()  # its own answer does not count


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: RandomNegatives(SHARDING, 0), "at least 1 from each shard"),
        (lambda: RandomNegatives(SHARDING, 1, corruption="th"), "known are h, t, ht"),  # type: ignore[arg-type]
        (lambda: RandomNegatives(SHARDING, 1, exclude="all"), "known are nothing, answer, known"),  # type: ignore[arg-type]
        (lambda: RandomNegatives(SHARDING, 1, exclude="known"), "need `known`"),
        (lambda: TypedNegatives(SHARDING, 1, shared=True), "cannot be shared"),
        (lambda: RandomNegatives(SHARDING, 2, total=5), "5 candidates from 5 shards are not 2 from each"),
        (lambda: RandomNegatives(SHARDING, 2, total=11), "11 candidates from 5 shards are not 2 from each"),
        (lambda: TripleNegatives(SHARDING, heads=[[1]]), "no tails are given"),
        (
            lambda: rigid(TripleNegatives(SHARDING, heads=[[1]] * 3, corruption="h")),
            "3 lists of heads for 2000 triples",
        ),
        (lambda: TripleNegatives(SHARDING, heads=[1], tails=[[1]]), "both be"),
        (lambda: TripleNegatives(SHARDING, heads=[0.5], corruption="h"), "integers"),
        (lambda: TripleNegatives(SHARDING, tails=[ENTITIES], corruption="t"), "501 entities"),
    ],
)
def test_mismatched_arguments_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises((BadInput, IdOutOfRange), match=reason):
        make()


def test_one_entity_a_worker() -> None:
    sharding = Sharding.create(4, 4, entity_types=[0, 1, 1, 2])
    partition = PartitionedTriples.create([[0, 0, 1], [2, 0, 3]], sharding)
    for negatives in (RandomNegatives(sharding, 3), TypedNegatives(sharding, 3), AllEntities(sharding)):
        sampler = RigidSampler(partition, 4, negatives=negatives)
        assert len({batch.gathered_rows for batch in everyones(sampler, 0)}) == 1
