"""Options that several commands take, and the headings under which `--help` lists options."""

from __future__ import annotations

from functools import partial

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.store_url import byte_count
from elastable.embedding_store.wire.server.call_room import CallLimits
from elastable.master.api import KNOWN_VALUES

__all__ = [
    "CLIENT_BYTES",
    "CLIENT_CALLS",
    "CLIENT_RATE",
    "HTTP",
    "INSECURE",
    "LISTEN",
    "NOT_FINITE",
    "OFFLOAD_ABOVE",
    "PROFILE",
    "STORE_URL",
    "TRANSPORT",
    "check_addresses",
    "client_limits",
    "deadline",
    "of_job",
    "of_model",
    "of_network",
    "of_saving",
    "of_store",
    "of_workers",
]

of_job = partial(Option, group="The job")
of_model = partial(Option, group="Data and model")
of_store = partial(Option, group="Store and locations")
of_saving = partial(Option, group="Checkpoints and output")
of_workers = partial(Option, group="Slow workers")
of_network = partial(Option, group="Network")

OFFLOAD_ABOVE = of_model(
    "Move each plain keras.layers.Embedding of more elements to the store; 0: none.",
    flags=("--offload-embeddings-above",), at_least=0, metavar="ELEMENTS",
)  # fmt: skip
STORE_URL = of_store(
    "memory, file:///folder, or redis://[user:pass@]host:port (rediss:// for TLS); docs/tiers.md says more.",
    metavar="URL",
)
LISTEN = of_network("Address to listen on; port 0 takes a free one.", metavar="HOST:PORT")
INSECURE = of_network(
    "Listen beyond this host without TLS or a token: whoever reaches the port may use everything it serves."
)
HTTP = of_network(
    "Serve metrics, health and a live page over HTTP at this address; port 0 takes a free one.",
    metavar="HOST:PORT",
    unset="off",
)
CLIENT_CALLS = of_network(
    "Calls of one client (a connection) under way or waiting at this server; for one more it is told so, and waits.",
    at_least=16, metavar="N",
)  # fmt: skip
CLIENT_BYTES = of_network(
    "Bytes of requests of one client that this server receives at once; for more it is told so, and waits.",
    metavar="SIZE", unset="a sixteenth of the memory, at least 512 MiB",
)  # fmt: skip
CLIENT_RATE = of_network(
    "Calls a second that one client may make at this server; for one more it is told so, and waits.",
    at_least=10, metavar="N", unset="no limit",
)  # fmt: skip
TRANSPORT = of_network(
    "How processes on this host read rows: auto takes the server's shared memory where that is possible, else gRPC.",
    choices=("auto", "grpc", "shared"),
)
PROFILE = of_workers(
    "Write a profile of ten micro-batches of a worker to this folder, for TensorBoard.", metavar="DIR", unset="none"
)
NOT_FINITE = of_job("What to do with gradients that hold NaN or Inf.", choices=KNOWN_VALUES["not_finite"])


def check_addresses(**addresses: str | None) -> None:
    """Raises `BadInput` for an address to listen on that is none, by its option."""
    for option, address in addresses.items():
        try:
            if address is not None:
                Address.parse(address)
        except BadInput as error:
            raise BadInput(f"--{option}: {error}") from error


def deadline(meaning: str) -> Option:
    return of_network(meaning, flags=("--deadline",), above=0, metavar="SECONDS")


def client_limits(calls: int, size: str | None, rate: int | None) -> CallLimits:
    """The limits of a server whose options are `CLIENT_CALLS`, `CLIENT_BYTES` and `CLIENT_RATE`.

    Raises:
        BadInput: a size that is none, or nothing.
    """
    most = None if size is None else byte_count(size)
    if most == 0:
        raise BadInput(f"--client-bytes {size}: must be above 0")
    return CallLimits(calls_of_a_client=calls, upload_bytes_of_a_client=most, calls_a_second_of_a_client=rate)
