"""Batches made ahead in a thread are the sampler's own, from any step on."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from embedding_store.errors import BadInput
from tests.worker.bess.graphs import random_triples, typed_sharding
from worker.bess.ahead import BatchesAhead
from worker.bess.partition import PartitionedTriples
from worker.bess.random_negatives import RandomNegatives
from worker.bess.rigid_sampler import RigidSampler


def sampler() -> RigidSampler:
    sharding = typed_sharding()
    partition = PartitionedTriples.create(random_triples(), sharding)
    return RigidSampler(partition, 100, negatives=RandomNegatives(sharding, 3))


def test_a_run_that_stops_goes_on_where_it_stood() -> None:
    expected = [sampler().batch(step, 1) for step in range(12)]
    with BatchesAhead(sampler(), 1, ahead=3) as batches:
        found = [next(batches) for _ in range(5)]
        stopped = batches.step
    with BatchesAhead(sampler(), 1, start=stopped) as batches:
        found += [next(batches) for _ in range(7)]
    for one, other in zip(found, expected, strict=True):
        assert one.step == other.step
        for name in ("head", "relation", "tail", "triple", "mask", "weight"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert one.negatives is not None
        assert other.negatives is not None
        np.testing.assert_array_equal(one.negatives.rows, other.negatives.rows)


def test_its_thread_ends_with_it_and_its_errors_are_raised() -> None:
    with BatchesAhead(sampler(), 2) as batches:
        next(batches)
        assert "batches-2" in " ".join(thread.name for thread in threading.enumerate())
    assert "batches-2" not in " ".join(thread.name for thread in threading.enumerate())
    with BatchesAhead(sampler(), 7) as batches, pytest.raises(BadInput, match="workers are 0"):
        next(batches)
    with pytest.raises(BadInput, match="at least 1"):
        BatchesAhead(sampler(), 0, ahead=0)
