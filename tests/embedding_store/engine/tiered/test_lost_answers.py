"""What a tier has done, and its answer was lost: the store writes on."""

import pytest

from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.errors import Unavailable
from elastable.embedding_store.log.contract import NoLog
from tests.embedding_store.disturbed_job import SPECS, commit_of, everything, undisturbed
from tests.embedding_store.engine.failing_tier import FailingTier
from tests.embedding_store.engine.tiered_stores import tiered_store


class LosingTier(FailingTier):
    """Makes each table, and the first time it seems to have failed."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = set[str]()

    def create(self, table: TierTable) -> None:
        super().create(table)
        if table.name not in self.lost:
            self.lost.add(table.name)
            raise Unavailable("no answer")


def test_tables_that_were_made_without_an_answer_are_written() -> None:
    tier = LosingTier()
    with tiered_store(tier, NoLog(), 1 << 20) as store:
        for spec in SPECS.values():
            store.create_table(spec)
        store.commit(commit_of(1))
        for _ in SPECS:
            with pytest.raises(Unavailable):
                store.flush()
        store.flush()
    assert len(tier.lost) == len(SPECS)
    with tiered_store(tier.copy(), NoLog(), 1 << 20) as again, undisturbed(1) as expected:
        assert everything(again) == everything(expected)
