"""A gRPC server as Elastable runs it: bounded, watched, and open to inspection."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.measures.counters import Counts
from elastable.embedding_store.measures.spans import PROCESS
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.wire.access.callers import Callers
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.access.roles import Role
from elastable.embedding_store.wire.channels.server_connection import KEEPALIVE_MS, KEEPALIVE_OPTIONS, MESSAGE_OPTIONS
from elastable.embedding_store.wire.server.access_check import AccessCheck
from elastable.embedding_store.wire.server.audit import AuditedCalls
from elastable.embedding_store.wire.server.call_counts import CallCounts
from elastable.embedding_store.wire.server.call_guard import HEALTH_CHECK, CallGuard
from elastable.embedding_store.wire.server.handlers import Handler
from elastable.embedding_store.wire.server.health import Health, NotReady
from elastable.embedding_store.wire.server.limits.call_limits import CallLimits
from elastable.embedding_store.wire.server.traced_calls import TracedCalls

__all__ = ["GrpcServer", "Service"]

_OPTIONS = [
    *MESSAGE_OPTIONS,
    # Two servers must not share a port in silence.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE_OPTIONS,
    # Clients ask as often as we do; half of that still is no abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
]


_SPARE = 16  # threads for health checks and refusals while all others are taken


@dataclass(frozen=True, slots=True)
class Service:
    """One service of a server.

    Attributes:
        name: Its full name, `package.Service`.
        handlers: Method name -> handler.
        close: Ends calls that would last as long as their client lives.
        sessions: Names of those calls.
        waiting: Names of other calls that may wait for something to happen here. Methods of both kinds may return a
            `Later`.
        brief: Those of `waiting` whose methods take microseconds and wait for nothing: no thread is asked to do it.
        not_ready: Says why it cannot do its work now; None: it can. Health checks ask it.
    """

    name: str
    handlers: dict[str, Handler]
    close: Callable[[], None] = lambda: None
    sessions: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    brief: frozenset[str] = frozenset()
    not_ready: NotReady = lambda: None


class GrpcServer:
    """Serves some services, with health, from construction to `stop`; with reflection where nothing secures it.

    Args:
        address: `host:port` to listen on; port 0 takes a free one.
        services: What is served.
        limits: Calls under way at once, and how long clients may take; one more is refused, and the client tries
            again. Threads start as they are needed.
        credentials: What it is secured by, and asks of clients; None: those of the environment.
        insecure: Whether it may be open, in plain text and without a token, to others than this host.
        anonymous: The role of callers who show no token. None: there are none where the credentials hold tokens or
            roles of certificates; elsewhere everybody is a worker.

    Attributes:
        address: `host:port` that it listens on, the port taken.
        health: What it says of itself.
        calls: Calls that have ended, by method and status code.

    Raises:
        BadInput: the address cannot be listened on, or not with such credentials; names it and why.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[Service],
        limits: CallLimits = CallLimits(),  # noqa: B008 - it is frozen
        credentials: Credentials | None = None,
        insecure: bool = False,
        anonymous: Role | None = None,
    ) -> None:
        where = Address.parse(address)
        credentials = Credentials.from_environment() if credentials is None else credentials
        secured = credentials.for_server(where, insecure)
        self._services = tuple(services)
        self._pool = ThreadPoolExecutor(limits.threads + _SPARE, thread_name_prefix="grpc")
        sessions = frozenset(f"/{service.name}/{call}" for service in services for call in service.sessions)
        waiting = frozenset(f"/{service.name}/{call}" for service in services for call in service.waiting)
        brief = frozenset(f"/{service.name}/{call}" for service in services for call in service.brief)
        self._guard = CallGuard(limits, self._pool, sessions, waiting, brief, _SPARE)
        callers = Callers(credentials, anonymous)
        self.calls, self.health = Counts(), Health({service.name: service.not_ready for service in services})
        served = {HEALTH_CHECK, *(f"/{service.name}/{call}" for service in services for call in service.handlers)}
        self._server = grpc.server(
            self._pool,
            interceptors=[
                *([] if PROCESS.tracer is None else [TracedCalls(served.__contains__, PROCESS.tracer)]),
                CallCounts(served.__contains__, self.calls),
                AccessCheck(callers),
                self._guard,
                AuditedCalls(callers),
            ],
            options=_OPTIONS,
            maximum_concurrent_rpcs=limits.threads + _SPARE,
        )
        self._server.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(service.name, service.handlers) for service in services)
        )
        health_handler = grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": self.health.handler()})
        self._server.add_generic_rpc_handlers((health_handler,))
        if secured is None and not credentials.tokens:  # a secured server describes itself to nobody
            names = [service.name for service in services]
            reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        try:
            port = (
                self._server.add_insecure_port(str(where))
                if secured is None
                else self._server.add_secure_port(str(where), secured)
            )
        except RuntimeError as error:
            self._server.stop(None)
            self._guard.close()
            self._pool.shutdown(wait=False)
            raise BadInput(f"cannot listen on {address}: {_why_not(where)}") from error
        self.address = str(Address(where.host, port))
        self._server.start()

    def stop(self, grace_s: float = 2.0) -> None:
        """Takes no more calls, ends sessions, and gives other calls `grace_s` seconds to end.

        Stopping twice is harmless.
        """
        self.health.stop()
        stopped = self._server.stop(grace_s)
        for service in self._services:
            service.close()
        stopped.wait(grace_s + 5.0)
        self._guard.close()
        self._pool.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _why_not(where: Address) -> str:
    """What the system says to a plain socket: gRPC only logs it."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC could not bind it"
