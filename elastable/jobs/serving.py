"""Processes that serve rows until a signal ends them: a parameter server without a model, and a store server."""

import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from rich.console import Console

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
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.shared.shared_store import channels_of
from elastable.jobs.options import ServerOptions, ServingOptions, StoreServerOptions
from elastable.jobs.servers.store_registry import StoreRegistry
from elastable.jobs.store_watch import StoreHealth, refuse_live_owner
from elastable.master.checkpoints.row_saver import CheckpointRowSaver
from elastable.master.model.wrapping_optimizers import register_job_optimizers
from elastable.monitoring.metrics import Source, server_sources, shard_source, store_source
from elastable.monitoring.page.views import ShardView, Watched
from elastable.monitoring.watching import watched_over_http
from elastable.process.exit_codes import ExitCode
from elastable.process.heap import keep_collections_short
from elastable.process.logs import describe_process
from elastable.process.quiet import import_backend
from elastable.process.stopping import stopping_on_signals


class _Serving:
    """A store that this process serves until `held` ends.

    Args:
        url: Of the store.
        held: Closes it.
        deadline_s: As of `open_store`.

    Raises:
        BadInput: processes of this host are to read from shared memory, and the store has none.
    """

    def __init__(
        self, options: ServingOptions, url: str, console: Console, held: ExitStack, deadline_s: float | None = None
    ) -> None:
        self._options, self._url, self._console, self._held = options, url, console, held
        self._stopped, self._lost = threading.Event(), list[ElastableError]()
        self._health, self._lookups = StoreHealth(), LookupCounts()
        self.store = held.enter_context(open_store(url, shared=options.transport != "grpc", deadline_s=deadline_s))
        held.enter_context(warming(self.store))
        self._channels = channels_of(self.store)
        if self._channels is None and options.transport == "shared":
            raise BadInput(f"--transport shared: rows of the store {redacted(url)} are not in shared memory")

    def serve(self, shard: Shard, anonymous: Role | None) -> GrpcServer:
        """Begins to answer; `anonymous`: as of `GrpcServer`."""
        keep_collections_short()
        options, credentials = self._options, Credentials.from_environment()
        services = [shard_service(shard, self._channels, self._lookups, self._health.not_ready)]
        limits, insecure = options.limits, options.insecure
        server = GrpcServer(options.listen, services, limits, credentials, insecure, anonymous)
        self._held.enter_context(server)
        self._held.enter_context(self._health.watching(self.store, self.lose))
        return server

    def lose(self, why: ElastableError) -> None:
        """Whoever starts the process again has it open what is there now; this one's rows are lost, or another's."""
        self._lost.append(why)
        self._stopped.set()

    def run(self, role: str, server: GrpcServer, shard: Shard, sources: Mapping[str, Source]) -> None:
        """Serves until a signal. Raises what lost the store."""
        options, not_ready = self._options, self._health.not_ready
        found: dict[str, Source] = {"store": partial(store_source, self.store, not_ready), **sources}
        found |= server_sources(role, server, self._lookups)
        watched = Watched(found, server.health.not_ready, ShardView(shard, self._url, not_ready))
        shown = watched_over_http(options.http, options.insecure, watched, self._console)
        with shown, stopping_on_signals(lambda reason: self._stopped.set(), self._console):
            while not self._stopped.wait(1.0):
                if shard.clients is not None:
                    shard.clients.settle()
        if self._lost:
            raise self._lost[0]


def run_parameter_server(options: ServerOptions, console: Console) -> int:
    """Serves tables to any client until a signal ends it; the exit code.

    Raises:
        BadInput: clients are to read from shared memory, and the store has none; or another process writes to it.
        TakenOver, StoreBroken: its rows are another process's, or lost.
        ElastableError: the store cannot be opened, or the address not be used.
    """
    register_job_optimizers(import_backend)
    describe_process(role="server")
    with ExitStack() as held:
        serving = _Serving(options, options.store, console, held, operation_deadline(options.deadline_s))
        refuse_live_owner(serving.store.other_writer)
        pushes = ClientPushes(serving.store, options.not_finite, options.deadline_s)
        shard = Shard(serving.store, url=redacted(options.store), clients=pushes)
        server = serving.serve(shard, None)
        line = f"parameter server at {server.address}, store {redacted(options.store)}"
        console.print(line, highlight=False, markup=False)
        serving.run("server", server, shard, {})
    return ExitCode.DONE


def run_store_server(options: StoreServerOptions, console: Console) -> int:
    """Serves one shard until a signal ends it; the exit code.

    Raises:
        BadInput: workers are to read from shared memory, and the store has none.
        TakenOver: another server has its number in the registry, or its rows are another process's, or gone.
        ElastableError: the store cannot be opened, or the address not be used.
    """
    register_job_optimizers(import_backend)
    describe_process(role="store", shard=options.listen)
    with ExitStack() as held:
        registration, url = None, options.store
        if options.register is not None:
            # It keeps its number until it ends: whoever has it next finds the rows in no other's hands.
            registry = held.enter_context(StoreRegistry(options.register))
            host = _called(options, options.listen).rpartition(":")[0]
            registration = held.enter_context(registry.take(options.number, host))
            url = url_of_server(url, registration.number)
        serving = _Serving(options, url, console, held)
        store = serving.store
        shard = Shard(store, byte_count(options.gradient_bytes), CheckpointRowSaver(store), redacted(url))
        # Where nobody set a token or a role, whoever reaches the port may claim the server: as a Redis without one.
        credentials = Credentials.from_environment()
        anonymous = None if credentials.tokens or credentials.roles_of_names else Role.ADMINISTRATOR
        server = serving.serve(shard, anonymous)
        describe_process(shard=server.address)
        line = f"store server at {server.address}, store {redacted(url)}, version {store.version()}"
        console.print(line, highlight=False, markup=False)
        if registration is not None:
            registration.announce(_called(options, server.address), lambda reason: serving.lose(TakenOver(reason)))
        serving.run("store", server, shard, {"pushes": partial(shard_source, shard)})
    return ExitCode.INTERRUPTED  # the job is not done: whoever starts its servers starts another


def _called(options: StoreServerOptions, listening: str) -> str:
    """Where others call the server."""
    if options.advertise is not None:
        return str(Address.parse(options.advertise))
    where = Address.parse(listening)
    return str(replace(where, host=socket.gethostname())) if where.host in ("0.0.0.0", "::") else str(where)
