"""Stores of a job that a location file names."""

from pathlib import Path

import pytest

from elastable.assembly import locations_of, open_places, refuse_beside_servers
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.errors import BadInput
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job
from tests.elastable.processes import CLICK_JOB
from tests.embedding_store.shards.served_shards import served

SERVERS = "servers:a:1,b:2"


def test_shards_in_other_processes_are_refused_in_a_location_file_too(tmp_path: Path) -> None:
    file = tmp_path / "locations.toml"
    file.write_text('[stores]\nredis = "token:grpc://a:1,grpc://b:1"\n[overrides]\nusers = "redis"\n')
    with pytest.raises(BadInput, match=r"token:grpc://a:1,\.\.\.: .* write --stores host:port,host:port instead"):
        open_places(locations_of(file, "memory"), {"users": "redis"}, "memory")


@pytest.mark.parametrize(
    ("text", "places", "message"),
    [
        ('[overrides]\nusers = "redis"\n', {"users": "redis"}, "l.toml places users in redis, and with --stores"),
        ('[stores]\nfile = "file:///x"\n', {"users": "memory"}, "l.toml names a store, file, and with --stores"),
        ('[stores]\nmemory = "memory"\n', {"users": "memory"}, "l.toml names a store, memory, and with --stores"),
    ],
)
def test_tables_beside_servers_are_refused(tmp_path: Path, text: str, places: dict[str, str], message: str) -> None:
    file = tmp_path / "l.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=rf"{message} .* leave \[stores\] and every storage but worker out of the file"):
        refuse_beside_servers(file, locations_of(file, SERVERS), places, SERVERS)


def test_tables_on_the_workers_leave_the_others_to_the_store_servers(tmp_path: Path) -> None:
    file = tmp_path / "l.toml"
    file.write_text('[weight]\nmin_elements_for_off_worker = 1000\n[overrides]\nwords = "memory"\n')
    with served(2) as (servers, store):
        url = f"servers:{store.address}"
        prepared = prepare_job(JobOptions(CLICK_JOB, store=url, locations=file))
        with prepared.store:
            assert isinstance(prepared.store, StoreServers)
            assert (prepared.job.on_worker, prepared.job.store_url) == (("users",), url)
            assert list(prepared.tables) == list(prepared.store.specs()) == ["words"]
            assert all(list(server.store.specs()) == ["words"] for server in servers)
