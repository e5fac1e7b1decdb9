"""Where a master and store servers are: a list, a name, a file; looked at again when one is gone."""

import re
from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.jobs.options import WorkerOptions
from elastable.jobs.servers.finding import Peers, find_servers, server_now
from tests.dns_server import DnsServer
from tests.elastable.processes import CLICK_JOB


def test_a_file_of_addresses_is_read_again_each_time(tmp_path: Path) -> None:
    file = tmp_path / "stores"
    stores = [f"file://{file}"]
    with pytest.raises(Unavailable, match="leads to nothing after 0 s"):
        find_servers(stores, 0.0)
    file.write_text("host-a:1,host-b:2\n")
    assert find_servers(stores, 60.0) == "servers:host-a:1,host-b:2"
    known = ["host-a:1", "host-b:2"]
    file.write_text("host-a:1\nhost-c:3")
    assert [server_now(stores, number, known) for number in range(2)] == ["host-a:1", "host-c:3"]
    file.write_text("host-a:1")
    assert server_now(stores, 1, known) is None
    assert Peers.parse("--master", f"file://{file}").other_than("host-a:1") == "host-a:1"


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"host-a", "write host:port"), (b"h:1\xff", "ascii"), (b"h:1 " * 70_000, "more than 262,144 bytes")],
)
def test_what_is_no_file_of_addresses_is_named(content: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "stores"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=f"file of addresses {re.escape(str(file))}: .*{why}"):
        Peers.parse("--stores", f"file://{file}").now()


@pytest.mark.parametrize(
    "text",
    ["file://", "file://here", "dns://m", "dns://m:0", "dns://host:53/m:1", "redis://host:6379", "host", "a:1,a:1"],
)
def test_a_master_that_cannot_be_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(BadInput, match=rf"--master {re.escape(text)}"):
        WorkerOptions(master=text, model=CLICK_JOB)


def test_the_next_address_of_a_name_is_tried_after_the_one_that_is_gone() -> None:
    with DnsServer() as dns:
        dns.answers["master.example."] = [("10.0.0.1", "10.0.0.2")]
        name = Peers.parse("--master", f"dns://{dns.address}/master.example:50051")
        assert sorted(name.wait(60.0)) == ["10.0.0.1:50051", "10.0.0.2:50051"]
        assert name.other_than("10.0.0.1:50051") == "10.0.0.2:50051"
        dns.answers["master.example."] = [("10.0.0.3",)]
        assert name.other_than("10.0.0.2:50051") == "10.0.0.3:50051"
    listed = Peers.parse("--master", "a:1,b:2")
    assert [listed.other_than(gone) for gone in ("a:1", "b:2", "c:3")] == ["b:2", "a:1", "a:1"]
