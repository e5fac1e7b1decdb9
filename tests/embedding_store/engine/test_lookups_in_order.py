"""Requests that are answered one after the other are read from a tier all at once."""

from collections.abc import Sequence

import numpy as np
import pytest

from elastable.embedding_store import RowBlock, TableSpec
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_source import LookupRequest
from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.engine.tiered import tiered_rows
from elastable.embedding_store.log.contract import NoLog
from elastable.embedding_store.tables.lookups import lookup_request
from tests.embedding_store.engine.tiered_stores import tiered_store
from tests.embedding_store.tiers.dict_tier import DictTier, Kept

ROWS, DIM = 400, 4
SPECS = {name: TableSpec(name, DIM, None) for name in ("a", "b")}


class CountingTier(DictTier):
    reads = 0

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        self.reads += 1
        return super().read(wanted)


def test_cold_rows_of_all_requests_are_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_rows, "_LEAST_FRAMES", 1)
    kept = Kept()
    values = {name: np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM) + n for n, name in enumerate(SPECS)}
    with tiered_store(DictTier(kept), NoLog(), 1) as store:
        for name, spec in SPECS.items():
            store.create_table(spec)
            store.put(name, [RowBlock(np.arange(ROWS), values[name], np.empty((ROWS, 0), np.float32))])
    tier = CountingTier(kept)
    with tiered_store(tier, NoLog(), 1) as store:  # opened again, so that all rows are cold
        requests: list[LookupRequest] = [
            lookup_request(spec, np.arange(start, start + 100)) for spec in SPECS.values() for start in (0, 100, 200)
        ]
        before = tier.reads
        assert len(list(store.lookup_in_order(iter(requests), store.version()))) == len(requests)
        assert tier.reads - before == 1
        for request in requests:
            np.testing.assert_array_equal(request.out, values[request.table][request.ids])
