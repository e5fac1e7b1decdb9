"""An evaluation's version stays readable while its master is busy, and is given up once it is gone."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import StaleVersion
from elastable.master.api import DenseSnapshot
from elastable.master.jobs.concurrent_evaluation import ConcurrentEvaluation
from tests.contracts.store_samples import commit, fixed, int64, update
from tests.waiting import until

SNAPSHOT = DenseSnapshot(0, (np.ones(2, np.float32),), ())


def test_it_needs_nobody_to_renew_its_pin() -> None:
    """A callback of the job that takes longer than the lease gives no evaluation up."""
    with MemoryStore(threads=1) as store:
        store.create_table(fixed())
        evaluation = ConcurrentEvaluation(SNAPSHOT, store.pin(lease_s=600.0), renew_every_s=0.01)
        commit(store, {"cities": update(int64(1, 2), 4)})
        (lease,) = store._pins._leases[0]
        ends = lease.ends
        until(lambda: lease.ends > ends)
        store.lookup({"cities": int64(1)}, version=0)
        assert evaluation.readable()
        evaluation.end()
        assert not store.pins()
        with pytest.raises(StaleVersion):
            store.lookup({"cities": int64(1)}, version=0)


def test_one_whose_version_is_gone_is_given_up_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryStore(threads=1, before_image_bytes=100) as store, caplog.at_level(logging.WARNING):
        store.create_table(fixed())
        evaluation = ConcurrentEvaluation(SNAPSHOT, store.pin(), renew_every_s=0.01)
        commit(store, {"cities": update(np.arange(90), 4)})  # more than the store keeps before-images of
        until(lambda: not evaluation.readable())
        evaluation.end()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the evaluation of version 0 is given up: the pin of version 0 is gone")
    assert "before_image_bytes allows 100" in caplog.messages[0]
