"""What people and other programs write in a line or a small file: addresses, URLs, sizes, tokens, settings."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np

from elastable.embedding_store.composite.locations import read_locations, storage_of_url
from elastable.embedding_store.contract.spec import spec_from_json, spec_to_json
from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.native.string_ids import hash_ids
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.checked_files import read_secret
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.support.store_url import TierOptions, byte_count, shard_urls
from elastable.embedding_store.tiers.redis.record_transfer import RecordTable
from elastable.embedding_store.tiers.redis.url import RedisUrl, redacted
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore
from elastable.master.tasks.progress import Progress
from tests.certificates import Authority
from tests.embedding_store.serving import client_service
from tests.fuzz.calls import WAIT_S
from tests.fuzz.mutator import Mutator
from tests.fuzz.store_calls import SPECS
from tests.fuzz.target import Finding, Target

_TABLE = RecordTable.of("n", TierTable("t", 24, b"described"), 4).to_json()
_PROGRESS = Progress(
    3, metrics=(np.ones(2, np.float32),), sequences={"w": 3}, logs={"loss": 0.5}, done=(1, 2)
).to_json()

_PARSERS: dict[str, tuple[Callable[[str], object], list[str]]] = {
    "address": (
        lambda text: Address.parse(text).for_this_host(),
        ["127.0.0.1:50051", "[::1]:0", "master:65535", "0.0.0.0:1"],
    ),
    "redis URL": (
        RedisUrl.parse,
        [
            "redis://user:pass%40word@host:6379,[::1]:7000/3?namespace=n&partitions=16&deadline=3.5",
            "rediss://h?ca=/tmp/ca.pem&before_image_bytes=1",
        ],
    ),
    "tier options": (TierOptions.taken_from, ["file:///data/rows?budget=2GiB&log=none", "file:///%20a"]),
    "shards": (shard_urls, ["token:memory,redis://a:1,b:2,file:///x", "encoding:memory,memory"]),
    "storage": (storage_of_url, ["token:redis://a,redis://b", "file:///x"]),
    "size": (byte_count, ["64MiB", "2 GiB", "1000"]),
    "redacted URL": (redacted, ["redis://user:secret@host/1", "memory"]),
    "printable": (printable, ["plain", "a\x1b[31mb\nc"]),
    "table spec": (spec_from_json, [spec_to_json(spec) for spec in SPECS.values()]),
    "table in Redis": (lambda text: RecordTable.from_json("n", b"t", text.encode(errors="replace")), [_TABLE]),
    "progress": (Progress.from_json, [_PROGRESS]),
    "string ids": (lambda text: hash_ids([text, ""]), ["a", "1", "-1"]),
}


class Words(Target):
    name = "words"
    share = 600

    def case(self, m: Mutator) -> str | None:
        name = m.choice(sorted(_PARSERS))
        parse, known = _PARSERS[name]
        text = m.choice(known)
        if text.startswith("{") and m.chance(0.7):
            text = json.dumps(m.mutated_json(json.loads(text)))
        else:
            text = m.mutated_text(text) if m.chance(0.9) else m.text()
        parse(text)
        return None


_LOCATIONS = """
[stores]
redis = "redis://localhost:6379"
[weight]
storage = "redis"
min_elements_for_off_worker = 4096
[optimizer_state]
replicated_tensor_sharding = true
[overrides]
users = "memory"
"""


class TextFiles(Target):
    name = "text-files"
    share = 60

    def open(self) -> None:
        self.folder = Path(self.held.enter_context(TemporaryDirectory()))
        authority = Authority(self.folder / "authority")
        certificate, key = authority.issue("right", "localhost")
        key.chmod(0o600)
        self.certificates = {"ca": authority.ca, "certificate": certificate, "key": key}
        self.path = self.folder / "file"
        descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600)
        os.close(descriptor)

    def case(self, m: Mutator) -> str | None:
        kind = m.small(3)
        if kind == 0:
            self.path.write_bytes(m.mutated(_LOCATIONS.encode()))
            read_locations(self.path, "memory")
        elif kind == 1:
            self.path.write_bytes(m.mutated(b"ab12" * 8 + b"\n"))
            os.environ["ELASTABLE_TOKEN_FILE"] = str(self.path)
            try:
                Credentials.from_environment()
            finally:
                del os.environ["ELASTABLE_TOKEN_FILE"]
        elif kind == 2:
            wrong = m.choice(sorted(self.certificates))
            self.path.write_bytes(m.mutated(self.certificates[wrong].read_bytes()))
            Credentials(**{**self.certificates, wrong: self.path})  # type: ignore[arg-type]
        else:
            self.path.write_bytes(m.bytes(m.small(40)))
            read_secret(self.path, "ELASTABLE_REDIS_PASSWORD_FILE")
        return None


class Tokens(Target):
    """Calls with a token that is not the server's, or none that can be."""

    name = "tokens"
    share = 100

    def open(self) -> None:
        self.token = "right-" * 5
        store = self.held.enter_context(SharedMemoryStore(1))
        services = [client_service(store)]
        server = self.held.enter_context(GrpcServer("127.0.0.1:0", services, credentials=Credentials(token=self.token)))
        channel = self.held.enter_context(grpc.insecure_channel(server.address))
        self.ask = channel.unary_unary(  # type: ignore[call-arg]
            f"/{store_pb2.DESCRIPTOR.services_by_name['Store'].full_name}/GetStoreStatus"
        )

    def case(self, m: Mutator) -> str | None:
        shown = m.mutated(f"Bearer {self.token}".encode())
        text = "".join(chr(byte) for byte in shown if 32 <= byte < 127)[:2_000].strip()  # type: ignore[attr-defined]
        scheme, _, token = text.partition(" ")
        right = scheme.lower() == "bearer" and token == self.token
        metadata = [("authorization", text)] * (1 if m.chance(0.9) else 2)
        try:
            self.ask(b"", WAIT_S, metadata)  # type: ignore[arg-type]
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise Finding(f"authorization {text!r} is answered with {error.code()}: {error.details()}") from error
            return "refused"
        if not right or len(metadata) != 1:
            raise Finding(f"authorization {text!r} is taken for the token")
        return None

    def check(self) -> None:
        self.ask(b"", WAIT_S, [("authorization", f"Bearer {self.token}")])  # type: ignore[arg-type]
