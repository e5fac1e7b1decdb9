"""The append-only file of a store that is closed: rows without the entries that they were logged by."""

import pytest

from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.tiers.redis import redis_tier as file_rewrite
from tests.contracts.store_samples import create_tables
from tests.embedding_store.disturbed_job import SPECS, commit_of, everything, undisturbed
from tests.servers import Server
from tests.waiting import until

pytestmark = pytest.mark.process

VERSIONS = 40
RULES = "~{elastable* +@read +@write +@transaction +@connection +@blocking +info +cluster|slots"


def rewritten(server: Server) -> bool:
    with server.client() as client:
        info = client.info("persistence")
        # Redis counts only what it has written after its start, and what a rewrite has left.
        under_way = info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]
        return not under_way and info["aof_base_size"] > 1000


def trained(server: Server, url: str) -> None:
    with create_tables(open_store(url), *SPECS.values()) as store:
        for version in range(1, VERSIONS + 1):
            store.commit(commit_of(version))


def test_a_store_that_is_closed_leaves_a_file_of_its_rows(durable: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_rewrite, "LEAST_BYTES", 1 << 16)
    monkeypatch.setattr(file_rewrite, "_TIMES", 0)
    with durable.client() as client:
        client.config_set("auto-aof-rewrite-percentage", 0)
    trained(durable, durable.url)
    until(lambda: rewritten(durable))
    rows = sum(len(commit_of(version).updates) * 100 for version in range(1, VERSIONS + 1))
    with durable.client() as client:
        assert client.info("persistence")["aof_current_size"] < rows * 24 / 4
    durable.kill()
    durable.start()
    with open_store(durable.url) as again, undisturbed(VERSIONS) as expected:
        assert everything(again) == everything(expected)


def test_a_small_file_and_one_that_may_not_be_rewritten_stay(durable: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with durable.client() as client:
        client.config_set("auto-aof-rewrite-percentage", 0)
        client.execute_command("ACL", "SETUSER", "trainer", "on", ">secret", *RULES.split())
        base = client.info("persistence")["aof_base_size"]
        trained(durable, f"{durable.url}?namespace=elastable1")
        monkeypatch.setattr(file_rewrite, "LEAST_BYTES", 1 << 16)
        monkeypatch.setattr(file_rewrite, "_TIMES", 0)
        trained(durable, f"redis://trainer:secret@{durable.address}?namespace=elastable2")
        info = client.info("persistence")
        assert (info["aof_rewrite_in_progress"], info["aof_base_size"]) == (0, base)
