"""A parameter server without a model, for any gRPC client."""

from __future__ import annotations

import threading

from rich.console import Console

from elastable.embedding_store.errors import BadInput, ElastableError
from elastable.embedding_store.measures import LookupCounts
from elastable.embedding_store.open_store import open_store, operation_deadline
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.warm import warming
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_store import channels_of
from elastable.jobs.servers.server_options import ServerOptions
from elastable.jobs.shared_options import client_limits
from elastable.jobs.store_watch import StoreHealth
from elastable.master.api import JobSpec
from elastable.master.jobs.bare_master import BareMaster
from elastable.master.keras.wrapping_optimizers import register_job_optimizers
from elastable.master.master_options import MasterOptions
from elastable.master.wire.master_service import master_service
from elastable.monitoring.metric import Source
from elastable.monitoring.page.views import ServerView
from elastable.monitoring.sources.server_source import server_sources
from elastable.monitoring.sources.store_source import StoreSource
from elastable.monitoring.watched import Watched
from elastable.monitoring.watching import watched_over_http
from elastable.process.exit_codes import ExitCode
from elastable.process.heap import keep_collections_short
from elastable.process.logs import describe_process
from elastable.process.quiet import import_tensorflow
from elastable.process.stopping import stopping_on_signals

__all__ = ["run_parameter_server"]


def run_parameter_server(options: ServerOptions, console: Console) -> int:
    """Serves tables to any client until a signal, or a client's `StopJob`, ends it; the exit code.

    Raises:
        BadInput: clients are to read from shared memory, and the store has none.
        TakenOver, StoreBroken: its rows are another process's, or lost.
        ElastableError: the store cannot be opened, or the address not be used.
    """
    register_job_optimizers(import_tensorflow)
    describe_process(role="server")
    job = JobSpec(job="bare", mode="async", not_finite=options.not_finite)
    deadline_s, shared = operation_deadline(options.deadline_s), options.transport != "grpc"
    with open_store(options.store, shared=shared, deadline_s=deadline_s) as store, warming(store):
        channels = channels_of(store)
        if channels is None and options.transport == "shared":
            raise BadInput(f"--transport shared: rows of the store {redacted(options.store)} are not in shared memory")
        master = BareMaster(store, job, MasterOptions(commit_deadline_s=options.deadline_s))
        stopped = threading.Event()
        keep_collections_short()

        def stop(reason: str) -> None:
            master.stop(reason)
            stopped.set()

        lost: list[ElastableError] = []

        def end(why: ElastableError) -> None:
            lost.append(why)
            stop(f"{type(why).__name__}: {why}")

        health, lookups = StoreHealth(), LookupCounts()
        rows = store_service(store, writable=True, lookups=lookups, not_ready=health.not_ready)
        services = [rows, master_service(master, channels)]
        limits = client_limits(options.client_calls, options.client_bytes, options.client_rate)
        server = GrpcServer(options.listen, services, limits, insecure=options.insecure)
        with server, health.watching(store, end):
            console.print(
                f"parameter server at {server.address}, store {redacted(options.store)}", highlight=False, markup=False
            )
            sources: dict[str, Source] = {
                "store": StoreSource(store, health.not_ready),
                **server_sources("server", server, lookups),
            }
            view = ServerView(master.status, store, health.not_ready)
            watched = Watched(sources, server.health.not_ready, view)
            shown = watched_over_http(options.http, options.insecure, watched, console)
            with shown, stopping_on_signals(stop, console):
                while not stopped.wait(1.0) and not master.lease_tasks("", 0, 0.0).finished:
                    pass
            if lost:
                raise lost[0]
    return ExitCode.DONE
