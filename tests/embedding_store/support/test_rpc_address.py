"""Addresses: what is taken, what is refused and how that is said."""

import pytest

from elastable.embedding_store import RemoteSource
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.address import Address


@pytest.mark.parametrize(
    ("written", "host", "port"),
    [("127.0.0.1:50051", "127.0.0.1", 50051), ("master-0.svc:1", "master-0.svc", 1), ("[::1]:0", "::1", 0)],
)
def test_an_address_is_a_host_and_a_port(written: str, host: str, port: int) -> None:
    address = Address.parse(written)
    assert (address.host, address.port) == (host, port)
    assert str(address) == written


@pytest.mark.parametrize(
    ("listened_on", "called"),
    [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7"), ("192.0.2.1:7", "192.0.2.1:7"), ("master:7", "master:7")],
)
def test_no_wildcard_is_called(listened_on: str, called: str) -> None:
    assert str(Address.parse(listened_on).for_this_host()) == called


@pytest.mark.parametrize(
    "written",
    ["", "host", ":50051", "host:", "host:x", "host:65536", "a b:1", "::1:50", "http://h:1", "h:" + "9" * 5_000],
)
def test_anything_else_is_refused_by_name(written: str) -> None:
    with pytest.raises(BadInput, match="address") as caught:
        Address.parse(written)
    assert repr(written) in str(caught.value)
    with pytest.raises(BadInput, match="address"):
        RemoteSource(written)
