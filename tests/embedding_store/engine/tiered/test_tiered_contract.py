"""A store with a tier keeps the store's contract, however few of its rows are in memory."""

from __future__ import annotations

from collections.abc import Iterator
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


class TestEveryRowInMemory(StoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Iterator[MakeStore]:
        def make(number: int) -> tuple[Tier, Log]:
            return FailingTier(), FileLog(tmp_path / str(number))

        with tiered_stores(make, HUGE) as stores:
            yield stores


class TestFewRowsInMemory(StoreContract):
    @pytest.fixture
    def make_store(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
        monkeypatch.setattr(tiered_rows, "_LEAST_FRAMES", 1)
        with tiered_stores(lambda number: (FailingTier(), NoLog()), TINY) as stores:
            yield stores


class TestFewRowsInMemoryAndTheRestInFiles(StoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
        monkeypatch.setattr(tiered_rows, "_LEAST_FRAMES", 1)

        def make(number: int) -> tuple[Tier, Log]:
            folder = tmp_path / str(number)
            return FileTier(folder / "rows", fsync=False), FileLog(folder / "log", fsync="never")

        with tiered_stores(make, TINY) as stores:
            yield stores
