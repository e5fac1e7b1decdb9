"""A store with a tier keeps the store's contract, however few of its rows are in memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine.tiered import tiered_rows
from elastable.embedding_store.log.contract import Log, NoLog
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.tiers.files.file_tier import FileTier
from tests.contracts.store_contract import StoreContract
from tests.contracts.store_samples import MakeStore
from tests.embedding_store.engine.failing_tier import FailingTier
from tests.embedding_store.engine.tiered_stores import tiered_stores

TINY, HUGE = 1, 1 << 30
KINDS: dict[str, tuple[int, Callable[[Path], tuple[Tier, Log]]]] = {
    "every row in memory": (HUGE, lambda folder: (FailingTier(), FileLog(folder))),
    "few rows in memory": (TINY, lambda folder: (FailingTier(), NoLog())),
    "the rest in files": (
        TINY,
        lambda folder: (FileTier(folder / "rows", fsync=False), FileLog(folder / "log", fsync="never")),
    ),
}


class TestTieredStores(StoreContract):
    @pytest.fixture(params=KINDS)
    def make_store(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[MakeStore]:
        budget, make = KINDS[request.param]
        monkeypatch.setattr(tiered_rows, "_LEAST_FRAMES", 1)
        with tiered_stores(lambda number: make(tmp_path / str(number)), budget) as stores:
            yield stores
