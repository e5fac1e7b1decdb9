"""Rows of a commit that could not be logged are never written to the tier."""

import pytest

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.open_store import open_store
from tests.embedding_store.disturbed_job import SPECS, commit_of, everything, undisturbed
from tests.servers import Server

pytestmark = pytest.mark.process


@pytest.mark.parametrize("flush", ["1000", "0.01"])
def test_a_store_that_is_closed_comes_back_without_them(durable: Server, flush: str) -> None:
    store = open_store(f"{durable.url}?flush={flush}", deadline_s=3.0)
    for spec in SPECS.values():
        store.create_table(spec)
    store.commit(commit_of(1))
    durable.kill()
    with pytest.raises(ElastableError):
        store.commit(commit_of(2))
    durable.start()
    store.close()
    with open_store(durable.url) as again, undisturbed(1) as expected:
        assert again.version() == 1
        assert everything(again) == everything(expected)
