"""A parameter server without a model, for any gRPC client."""

from __future__ import annotations

import threading

from rich.console import Console

from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.redis.url import redacted
from elastable.embedding_store.rpc.server import GrpcServer
from elastable.embedding_store.rpc.service import store_service
from elastable.embedding_store.shared.store import outboxes_of
from elastable.embedding_store.warm import warming
from elastable.exit_codes import ExitCode
from elastable.master.core import Master
from elastable.master.service import master_service
from elastable.stopping import stopping_on_signals

__all__ = ["run_bare_server"]


def run_bare_server(store_url: str, listen: str, console: Console, transport: str = "auto") -> int:
    """Serves tables to any client until a signal, or a client's `StopJob`, ends it; the exit code."""
    with open_store(store_url, shared=transport != "grpc") as store, warming(store):
        master = Master.bare(store)
        stopped = threading.Event()

        def stop(reason: str) -> None:
            master.stop(reason)
            stopped.set()

        with GrpcServer(
            listen, [store_service(store, writable=True), master_service(master, outboxes_of(store))]
        ) as server:
            console.print(f"parameter server at {server.address}, store {redacted(store_url)}", highlight=False)
            with stopping_on_signals(stop, console):
                while not stopped.wait(1.0) and not master.lease_tasks("", 0, 0.0).finished:
                    pass
    return ExitCode.DONE
