"""A store server: one shard of every table of a job, until a signal ends it."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from rich.console import Console

from elastable.embedding_store.errors import BadInput, ElastableError, TakenOver
from elastable.embedding_store.measures import LookupCounts
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.shards import Shard
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.store_url import byte_count, url_of_server
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.warm import warming
from elastable.embedding_store.wire.access.credentials import Credentials, Role
from elastable.embedding_store.wire.pushes.shard_service import shard_services
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.shared.shared_store import channels_of
from elastable.jobs.servers.server_options import StoreServerOptions
from elastable.jobs.servers.store_registry import Registration, StoreRegistry
from elastable.jobs.shared_options import client_limits
from elastable.jobs.store_watch import StoreHealth
from elastable.master.checkpoints.row_saver import CheckpointRowSaver
from elastable.master.keras.wrapping_optimizers import register_job_optimizers
from elastable.monitoring.metric import Source
from elastable.monitoring.page.views import ShardView
from elastable.monitoring.sources.server_source import server_sources
from elastable.monitoring.sources.shard_source import shard_source
from elastable.monitoring.sources.store_source import StoreSource
from elastable.monitoring.watched import Watched
from elastable.monitoring.watching import watched_over_http
from elastable.process.exit_codes import ExitCode
from elastable.process.heap import keep_collections_short
from elastable.process.logs import describe_process
from elastable.process.quiet import import_tensorflow
from elastable.process.stopping import stopping_on_signals

__all__ = ["run_store_server"]


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
        registration = None if options.register is None else _registered(options, options.register, held)
        url = options.store if registration is None else url_of_server(options.store, registration.number)
        store = held.enter_context(open_store(url, shared=options.transport != "grpc"))
        held.enter_context(warming(store))
        channels = channels_of(store)
        if channels is None and options.transport == "shared":
            raise BadInput(f"--transport shared: rows of the store {redacted(url)} are not in shared memory")
        shard = Shard(store, byte_count(options.gradient_bytes), CheckpointRowSaver(store), redacted(url))
        keep_collections_short()
        stopped, lost = threading.Event(), list[ElastableError]()

        def end(why: ElastableError) -> None:
            # Whoever starts the process again has it open what is there now; this one's rows are lost, or another's.
            lost.append(why)
            stopped.set()

        credentials = Credentials.from_environment()
        health, lookups = StoreHealth(), LookupCounts()
        server = GrpcServer(
            options.listen,
            shard_services(shard, channels, lookups, health.not_ready),
            client_limits(options.client_calls, options.client_bytes, options.client_rate),
            credentials=credentials,
            insecure=options.insecure,
            anonymous=_anonymous(credentials),
        )
        with server, health.watching(store, end):
            describe_process(shard=server.address)
            console.print(
                f"store server at {server.address}, store {redacted(url)}, version {store.version()}",
                highlight=False,
                markup=False,
            )
            if registration is not None:
                registration.announce(_called(options, server.address), lambda reason: end(TakenOver(reason)))
            sources: dict[str, Source] = {
                "store": StoreSource(store, health.not_ready),
                "pushes": partial(shard_source, shard),
                **server_sources("store", server, lookups),
            }
            view = ShardView(shard, url, health.not_ready)
            watched = Watched(sources, server.health.not_ready, view)
            shown = watched_over_http(options.http, options.insecure, watched, console)
            with shown, stopping_on_signals(lambda reason: stopped.set(), console):
                stopped.wait()
            if lost:
                raise lost[0]
    return ExitCode.DONE


def _registered(options: StoreServerOptions, url: str, held: ExitStack) -> Registration:
    """Its number, which the server keeps until it ends: whoever has it next finds the rows in no other's hands."""
    registry = held.enter_context(StoreRegistry(url))
    return held.enter_context(registry.take(options.number, _called(options, options.listen).rpartition(":")[0]))


def _called(options: StoreServerOptions, listening: str) -> str:
    """Where others call the server."""
    if options.advertise is not None:
        return str(Address.parse(options.advertise))
    where = Address.parse(listening)
    return str(replace(where, host=socket.gethostname())) if where.host in ("0.0.0.0", "::") else str(where)


def _anonymous(credentials: Credentials) -> Role | None:
    """Where nobody set a token or a role, whoever reaches the port may claim the server: as a Redis without one."""
    return None if credentials.tokens or credentials.roles_of_names else Role.ADMINISTRATOR
