"""A job takes a store over in which a master that died has left pins."""

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.jobs.options import JobOptions
from elastable.jobs.resuming.resume import fill_store
from elastable.master.api import JobSpec
from elastable.master.commits.dense_part import DensePart
from elastable.master.tasks.progress import Progress

SPEC = TableSpec("t", 2, 10)


def left_behind() -> MemoryStore:
    """A store with a row at version 3."""
    store = MemoryStore(threads=1)
    store.create_table(SPEC)
    store.put("t", [RowBlock(np.array([4]), np.ones((1, 2), np.float32), np.empty((1, 0), np.float32))])
    store.reset_version(3)
    return store


def begin(store: MemoryStore) -> Progress:
    options = JobOptions(Path("job.py"), overwrite=True)
    return fill_store(store, {"t": SPEC}, DensePart(), JobSpec(), options, None).progress  # type: ignore[arg-type]


def test_leases_of_the_dead_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with left_behind() as store:
        store.pin(lease_s=0.4)
        with caplog.at_level(logging.WARNING):
            assert begin(store) == Progress()
        assert (store.version(), store.row_count("t")) == (0, 0)
    (logged,) = [record.message for record in caplog.records if "pinned" in record.message]
    assert logged.startswith("versions 3 of the store are pinned")


def test_a_pin_that_lives_on_is_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastable.jobs.resuming.resume._PINS_END_S", 0.3)
    with left_behind() as store, store.pin(lease_s=600.0) as pin:
        with pytest.raises(BadInput, match="'t' cannot be dropped while versions are pinned"):
            begin(store)
        np.testing.assert_array_equal(pin.lookup({"t": np.array([4])})["t"], [[1.0, 1.0]])


def test_a_pin_that_is_released_is_not_waited_for_any_longer() -> None:
    with left_behind() as store:
        pin = store.pin(lease_s=600.0)
        releasing = threading.Timer(0.2, pin.close)
        releasing.start()
        begin(store)
        releasing.join(60)
        assert store.row_count("t") == 0
