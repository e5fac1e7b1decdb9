"""Processes that serve rows until a signal ends them: a parameter server without a model, and a store server."""

import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from rich.console import Console

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, ElastableError, TakenOver
from elastable.embedding_store.measures import LookupCounts
from elastable.embedding_store.open_store import open_store, operation_deadline
from elastable.embedding_store.shards.client_pushes import ClientPushes
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.store_url import byte_count, url_of_server
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.warm import warming
from elastable.embedding_store.wire.access.credentials import Credentials, Role
from elastable.embedding_store.wire.pushes.shard_service import shard_service
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.shared.shared_channel import SharedChannels
from elastable.embedding_store.wire.shared.shared_store import channels_of
from elastable.jobs.options import ServerOptions, ServingOptions, StoreServerOptions, client_limits
from elastable.jobs.servers.store_registry import StoreRegistry
from elastable.jobs.store_watch import StoreHealth
from elastable.master.checkpoints.row_saver import CheckpointRowSaver
from elastable.master.model.wrapping_optimizers import register_job_optimizers
from elastable.monitoring.metrics import Source, server_sources, shard_source, store_source
from elastable.monitoring.page.views import ShardView, View, Watched
from elastable.monitoring.watching import watched_over_http
from elastable.process.exit_codes import ExitCode
from elastable.process.heap import keep_collections_short
from elastable.process.logs import describe_process
from elastable.process.quiet import import_tensorflow
from elastable.process.stopping import stopping_on_signals


@dataclass(frozen=True, slots=True)
class _Serving:
    """A store that this process serves.

    Attributes:
        stopped: Set when it is to end.
        lost: What lost the store, if that ended it.
    """

    options: ServingOptions
    url: str
    console: Console
    stopped: threading.Event = field(default_factory=threading.Event)
    lost: list[ElastableError] = field(default_factory=list)
    health: StoreHealth = field(default_factory=StoreHealth)
    lookups: LookupCounts = field(default_factory=LookupCounts)

    def open(self, held: ExitStack, deadline_s: float | None = None) -> tuple[EmbeddingStore, SharedChannels | None]:
        """The store, and what processes of this host read it by; both until `held` ends."""
        store = held.enter_context(open_store(self.url, shared=self.options.transport != "grpc", deadline_s=deadline_s))
        held.enter_context(warming(store))
        channels = channels_of(store)
        if channels is None and self.options.transport == "shared":
            raise BadInput(f"--transport shared: rows of the store {redacted(self.url)} are not in shared memory")
        return store, channels

    def server(self, services: Sequence[Service], credentials: Credentials, anonymous: Role | None) -> GrpcServer:
        keep_collections_short()
        limits, insecure = client_limits(self.options), self.options.insecure
        return GrpcServer(self.options.listen, services, limits, credentials, insecure, anonymous)

    def lose(self, why: ElastableError) -> None:
        """Whoever starts the process again has it open what is there now; this one's rows are lost, or another's."""
        self.lost.append(why)
        self.stopped.set()

    def run(
        self,
        role: str,
        server: GrpcServer,
        sources: Mapping[str, Source],
        view: View,
    ) -> int:
        """Serves until a signal; the exit code. Raises what lost the store."""
        options = self.options
        watched = Watched({**sources, **server_sources(role, server, self.lookups)}, server.health.not_ready, view)
        shown = watched_over_http(options.http, options.insecure, watched, self.console)
        with shown, stopping_on_signals(lambda reason: self.stopped.set(), self.console):
            while not self.stopped.wait(1.0):
                pass
        if self.lost:
            raise self.lost[0]
        return ExitCode.DONE

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False)


def run_parameter_server(options: ServerOptions, console: Console) -> int:
    """Serves tables to any client until a signal ends it; the exit code.

    Raises:
        BadInput: clients are to read from shared memory, and the store has none.
        TakenOver, StoreBroken: its rows are another process's, or lost.
        ElastableError: the store cannot be opened, or the address not be used.
    """
    register_job_optimizers(import_tensorflow)
    describe_process(role="server")
    serving = _Serving(options, options.store, console)
    not_ready = serving.health.not_ready
    with ExitStack() as held:
        store, channels = serving.open(held, operation_deadline(options.deadline_s))
        pushes = ClientPushes(store, options.not_finite, options.deadline_s)
        shard = Shard(store, url=redacted(options.store), clients=pushes)
        services = [shard_service(shard, channels, serving.lookups, not_ready)]
        server = held.enter_context(serving.server(services, Credentials.from_environment(), None))
        held.enter_context(serving.health.watching(store, serving.lose))
        serving.say(f"parameter server at {server.address}, store {redacted(options.store)}")
        sources = {"store": partial(store_source, store, not_ready)}
        return serving.run("server", server, sources, ShardView(shard, options.store, not_ready))


def run_store_server(options: StoreServerOptions, console: Console) -> int:
    """Serves one shard until a signal ends it; the exit code.

    Raises:
        BadInput: workers are to read from shared memory, and the store has none.
        TakenOver: another server has its number in the registry, or its rows are another process's, or gone.
        ElastableError: the store cannot be opened, or the address not be used.
    """
    register_job_optimizers(import_tensorflow)
    describe_process(role="store", shard=options.listen)
    with ExitStack() as held:
        registration = None
        if options.register is not None:
            # It keeps its number until it ends: whoever has it next finds the rows in no other's hands.
            registry = held.enter_context(StoreRegistry(options.register))
            host = _called(options, options.listen).rpartition(":")[0]
            registration = held.enter_context(registry.take(options.number, host))
        url = options.store if registration is None else url_of_server(options.store, registration.number)
        serving = _Serving(options, url, console)
        store, channels = serving.open(held)
        not_ready = serving.health.not_ready
        shard = Shard(store, byte_count(options.gradient_bytes), CheckpointRowSaver(store), redacted(url))
        credentials = Credentials.from_environment()
        services = [shard_service(shard, channels, serving.lookups, not_ready)]
        # Where nobody set a token or a role, whoever reaches the port may claim the server: as a Redis without one.
        anonymous = None if credentials.tokens or credentials.roles_of_names else Role.ADMINISTRATOR
        server = held.enter_context(serving.server(services, credentials, anonymous))
        held.enter_context(serving.health.watching(store, serving.lose))
        describe_process(shard=server.address)
        serving.say(f"store server at {server.address}, store {redacted(url)}, version {store.version()}")
        if registration is not None:
            registration.announce(_called(options, server.address), lambda reason: serving.lose(TakenOver(reason)))
        sources = {"store": partial(store_source, store, not_ready), "pushes": partial(shard_source, shard)}
        return serving.run("store", server, sources, ShardView(shard, url, not_ready))


def _called(options: StoreServerOptions, listening: str) -> str:
    """Where others call the server."""
    if options.advertise is not None:
        return str(Address.parse(options.advertise))
    where = Address.parse(listening)
    return str(replace(where, host=socket.gethostname())) if where.host in ("0.0.0.0", "::") else str(where)
