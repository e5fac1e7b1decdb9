"""Store servers in this process, over real gRPC, each of which can be killed and started again where it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastable.embedding_store import EmbeddingStore
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.shards.ownership import session_of
from elastable.embedding_store.shards.server_contract import RowPush, RowPushOutcome, ShardStore
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.embedding_store.wire.pushes.shard_service import shard_service
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.shared.shared_store import channels_of
from elastable.master.checkpoints.row_saver import CheckpointRowSaver

KEY = bytes(range(32))
"""Of the jobs of tests: by it servers know workers."""

_DEADLINE_S = 600.0  # of a call: the first commit of a process may compile its kernels, on a machine that is busy


class ServedShard:
    def __init__(self, url: str, most_bytes: int = 1 << 26, listen: str = "127.0.0.1:0") -> None:
        self._url, self._most_bytes = url, most_bytes
        self._listen = listen
        self.start()

    def start(self) -> None:
        """Serves at the address of before, from what its log holds."""
        self.store: EmbeddingStore = open_store(self._url, threads=1, shared=True)
        self.shard = Shard(self.store, self._most_bytes, CheckpointRowSaver(self.store))
        services = [shard_service(self.shard, channels_of(self.store))]
        self._server = GrpcServer(self._listen, services, anonymous=Role.ADMINISTRATOR)
        self.address = self._listen = self._server.address

    def move(self) -> None:
        """Ends the server, and starts it at another address."""
        self.stop()
        self._listen = "127.0.0.1:0"
        self.start()

    def cut(self) -> None:
        """Ends all connections at once: no call under way is answered any more. `stop` does the rest."""
        self._server._server.stop(None)

    def stop(self) -> None:
        """Ends the server; pushes that it held are lost."""
        self._server.stop(0.0)
        self.store.close()


@contextmanager
def served(
    count: int, folder: Path | None = None, most_bytes: int = 1 << 26, strategy: str = "token"
) -> Iterator[tuple[list[ServedShard], StoreServers]]:
    """Some store servers, with a log each if there is a folder; and all of them as one store."""
    urls = ["memory" if folder is None else f"memory?log={folder}/{n}" for n in range(count)]
    servers = [ServedShard(url, most_bytes) for url in urls]
    try:
        clients = [ShardClient(it.address, _DEADLINE_S) for it in servers]
        with StoreServers(clients, _DEADLINE_S, strategy) as store:
            yield servers, store
    finally:
        for server in servers:
            server.stop()


def stopped_with(servers: list[ServedShard], number: int) -> None:
    servers[number].stop()
    servers[number].start()


def begin_job(store: ShardStore, job: str, worker: str = "w") -> None:
    """Owns servers as the master of a job does, and pushes there as a worker that joined it."""
    store.begin_job(job, may_overflow=False, session_key=KEY)
    store.show_session(session_of(KEY, worker))


def push_as_sender(store: ShardStore, push: RowPush) -> RowPushOutcome:
    """Pushes as the worker that an asynchronous push is of."""
    store.show_session(session_of(KEY, push.sender))
    return store.push_rows(push)
