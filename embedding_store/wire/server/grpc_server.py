"""A gRPC server as Elastable runs it: bounded, watched, and open to inspection."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.errors import BadInput, ElastableError, PermissionDenied, Unauthenticated
from elastable.embedding_store.measures import PROCESS, TRACE_KEY, Counts, Tracer
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.access.credentials import (
    Caller,
    Callers,
    Credentials,
    Proof,
    Proofs,
    Role,
    Rule,
    rule_of_call,
)
from elastable.embedding_store.wire.channels.server_connection import KEEPALIVE_MS, KEEPALIVE_OPTIONS
from elastable.embedding_store.wire.channels.status_codes import answering
from elastable.embedding_store.wire.messages.frames import MAX_FRAME_BYTES
from elastable.embedding_store.wire.server.call_guard import HEALTH_CHECK, CallGuard
from elastable.embedding_store.wire.server.call_room import Call, CallLimits
from elastable.embedding_store.wire.server.connections import CountedPort, Standing
from elastable.embedding_store.wire.server.handlers import (
    Body,
    Handler,
    Interceptor,
    behaviour_of,
    with_behaviour,
)

OTHER_METHODS = "other"
"""The method of calls that are not served: their names come from clients."""


_OPTIONS = [
    # Two servers must not share a port in silence.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE_OPTIONS,
    # Clients ask as often as we do; half of that still is no abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.server_handshake_timeout_ms", 10_000),  # until TLS and HTTP/2 have begun
    ("grpc.max_connection_idle_ms", 300_000),  # without a call; pings are none
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
        waiting: Names of other calls with one answer that may wait for something to happen here. Methods of both kinds
            may return a `Later`, and so may all that answer with a stream.
        not_ready: Says why it cannot do its work now; None: it can. Health checks ask it.
        proofs: What its callers show within a job; none outside of one, where roles decide.
        of_known: Method name -> says of a request why it is only for callers who have shown a token or a certificate;
            "": it is not.
    """

    name: str
    handlers: dict[str, Handler]
    close: Callable[[], None] = lambda: None
    sessions: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    not_ready: "NotReady" = lambda: None
    proofs: Proofs = field(default_factory=dict)
    of_known: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)


class GrpcServer(Closing):
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
        largest_message: Bytes, either way; gRPC refuses a larger one as RESOURCE_EXHAUSTED.

    Attributes:
        address: `host:port` that it listens on, the port taken.
        health: What it says of itself.
        calls: Calls that have ended, by method and status code.
        connections: Those to its port.

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
        largest_message: int = MAX_FRAME_BYTES,
    ) -> None:
        where = Address.parse(address)
        credentials = Credentials.from_environment() if credentials is None else credentials
        secured = credentials.for_server(where, insecure)
        self._services = tuple(services)
        self._pool = ThreadPoolExecutor(limits.threads + _SPARE, thread_name_prefix="grpc")
        self._guard = CallGuard(limits, _SPARE)
        self.connections = CountedPort("gRPC")
        self.calls, self.health = Counts(), Health({service.name: service.not_ready for service in services})
        self._server = grpc.server(
            self._pool,
            interceptors=[
                CheckedCalls(services, self.calls, Callers(credentials, anonymous), self._guard, self.connections)
            ],
            options=[
                *_OPTIONS,
                ("grpc.max_send_message_length", largest_message),
                ("grpc.max_receive_message_length", largest_message),
                ("grpc.max_allowed_incoming_connections", self.connections.bounds.cap),
                ("grpc.max_concurrent_streams", limits.streams),
            ],
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
        self.connections.begin(port)

    def stop(self, grace_s: float = 2.0) -> None:
        """Takes no more calls, ends sessions, and gives other calls `grace_s` seconds to end.

        Stopping twice is harmless.
        """
        self.health.stop()
        stopped = self._server.stop(grace_s)
        for service in self._services:
            service.close()
        stopped.wait(grace_s + 5.0)
        self.connections.close()
        self._guard.close()
        self._pool.shutdown(wait=False)

    def close(self) -> None:
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


# The audit log: who made which administrative call, from where, on what, and what came of it


_LOG = logging.getLogger("elastable.audit")
_LONGEST = 400  # characters of each part of a line
_A_SECOND = 20  # refused calls that are logged a second; of the rest, how many there were


def audit(call: str, who: str, context: grpc.ServicerContext, what: str, outcome: str) -> None:
    """Writes one line to the logger `elastable.audit`: at INFO where the call was done, else at WARNING.

    Args:
        call: Name of the call.
        who: The caller's role, and what it is known by.
        context: Of the call; it says from where.
        what: On what; "" where that was not read.
        outcome: "done", or why not.
    """
    done = outcome == "done"
    if not done and not (left_out := _REFUSED.left_out()):
        return
    parts = [printable(part, _LONGEST, lines=False) for part in (who, unquote(context.peer()), what, outcome)]
    parts[2] = parts[2] and f" ({parts[2]})"
    if not done and left_out > 1:
        parts[3] += f"; {left_out - 1} refused calls before it are not in this log"
    _LOG.log(logging.INFO if done else logging.WARNING, "%s by %s from %s%s: %s", call, *parts)


class _Budget:
    """Bounds the lines that callers without a right to anything can have written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._second = 0
        self._count = 0
        self._skipped = 0

    def left_out(self) -> int:
        """0: write no line; else 1 and the lines left out since the last one that was written."""
        with self._lock:
            if (now := int(time.monotonic())) != self._second:
                self._second, self._count = now, 0
            self._count += 1
            if self._count > _A_SECOND:
                self._skipped += 1
                return 0
            skipped, self._skipped = self._skipped, 0
            return 1 + skipped


_REFUSED = _Budget()


def audited(method: str, handler: Handler, callers: Callers) -> Handler:
    """The handler of a call for administrators alone, which logs each call as it was parsed."""
    call, behaviour = method.rpartition("/")[2], behaviour_of(handler)

    def note(context: grpc.ServicerContext, request: object, outcome: str) -> None:
        audit(call, callers.named(context), context, _described(method, request), outcome)

    def answer(request: Body | Iterator[bytes], context: grpc.ServicerContext) -> Body:
        seen: object = request
        try:
            if not isinstance(request, Body):
                seen = first = [*islice(request, 1)]
                request = chain(first, request)
            reply: Body = behaviour(request, context)
        except BaseException as error:
            details: str | bytes = context.details()  # type: ignore[attr-defined]
            why = details or (str(error) if isinstance(error, ElastableError) else repr(error))
            note(context, seen, f"failed: {why.decode('utf-8', 'replace') if isinstance(why, bytes) else why}")
            raise
        note(context, seen, "done")
        return reply

    return with_behaviour(handler, answer)


def _described(method: str, request: object) -> str:
    """The fields of a request, or those of the header of its first frame, of a list of frames, in one line."""
    if isinstance(request, list):
        try:
            described = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", "."))
            frame: object = GetMessageClass(described.input_type).FromString(b"".join(request))
        except (KeyError, DecodeError):
            return ""
        request = getattr(frame, "header", None)
    if not isinstance(request, Message):
        return ""
    (told := type(request)()).CopyFrom(request)
    for of, _ in request.ListFields():
        if of.GetOptions().debug_redact:  # a secret
            told.ClearField(of.name)
    return text_format.MessageToString(told, as_one_line=True)


# What every call goes through: its span, its count, the judge of its caller, the limits, the audit log


_KNOWN = 256  # methods that are remembered; more than there are


_NO_SERVICE = Service("", {})


class CheckedCalls(Interceptor):
    """The server's one interceptor: puts each method behind the checks when it is first called.

    Calls of callers without a role end as UNAUTHENTICATED, and those that they may not make by the name of what they
    lack (`Callers.judge`), before a message is read; strangers do not learn which calls are served. Each call is
    counted when it ends, however it does.

    Args:
        services: Whose methods are counted by name.
        counts: Where calls are counted, by method and name of the status code.
        callers: Who may call.
        guard: The limits.
        connections: Is told who calls.
    """

    def __init__(
        self,
        services: Sequence[Service],
        counts: Counts,
        callers: Callers,
        guard: CallGuard,
        connections: CountedPort,
    ) -> None:
        self._services = {service.name: service for service in services}
        self._counts, self._callers, self._guard, self._connections = counts, callers, guard, connections
        self._known: dict[str, Handler] = {}
        begin = partial(self._begin, OTHER_METHODS, Rule(Role.READER, Proof.NONE), {}, None)
        self._not_served = guard.guarded("", grpc.stream_unary_rpc_method_handler(_not_served), begin, False, False)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of the call, behind the checks."""
        method = handler_call_details.method
        if (known := self._known.get(method)) is not None:
            return known
        handler = continuation(handler_call_details)
        if handler is None:
            return self._not_served
        name, _, call = method.lstrip("/").rpartition("/")
        service = self._services.get(name, _NO_SERVICE)
        rule = None if method == HEALTH_CHECK else rule_of_call(method)
        served = call in service.handlers or method == HEALTH_CHECK
        waits = handler.response_streaming or call in service.sessions or call in service.waiting
        said = f"{name}/{call}" if served else OTHER_METHODS
        if (why_known := service.of_known.get(call)) is not None:
            handler = self._of_known(call, handler, why_known)
        if rule is not None and rule.role is Role.ADMINISTRATOR and not handler.response_streaming:
            handler = audited(method, handler, self._callers)
        tracer = PROCESS.tracer if served else None
        if tracer is not None and not waits:
            handler, tracer = _within_span(handler, said, tracer), None
        begin = partial(self._begin, said, rule, service.proofs, tracer)
        handler = self._guard.guarded(method, handler, begin, call in service.sessions, waits)
        if len(self._known) < _KNOWN:
            self._known[method] = handler
        return handler

    def _of_known(self, call: str, handler: Handler, why_known: Callable[[Any], str]) -> Handler:
        """The handler, which refuses requests to strangers that are for callers who have shown who they are."""
        behaviour = behaviour_of(handler)

        def answer(request: object, context: grpc.ServicerContext) -> object:
            if (why := why_known(request)) and not self._callers.knows(self._callers.of(context)):
                needed = "start the server with ELASTABLE_WORKER_TOKEN_FILE, and give this client the same file"
                raise PermissionDenied(f"{call}: {why}; this caller shows no token: {needed}")
            return behaviour(request, context)

        return with_behaviour(handler, answer)

    def _begin(self, method: str, rule: Rule | None, proofs: Proofs, tracer: Tracer | None, call: Call) -> None:
        """Has a call counted at its end, which comes now unless its caller may make it; None: everybody may."""
        if tracer is not None and (parent := _parent_of(call.context)):
            at_end_of(call.context, tracer.begin_serving(method, parent))
        at_end_of(call.context, lambda: self._counts.add(method, call.code))
        standing = Standing.SILENT
        if rule is not None:
            name = "" if method == OTHER_METHODS else method.rpartition("/")[2]
            caller, tells = self._judged(rule, name, proofs, call.context), self._callers.knows_anybody
            call.identity = caller.shown if tells else ""
            standing = Standing.KNOWN if self._callers.knows(caller) or not tells else Standing.CALLER
        self._connections.heard(call.context.peer(), standing)

    def _judged(self, rule: Rule, call: str, proofs: Proofs, context: grpc.ServicerContext) -> Caller:
        """The caller, where it may make the call; ends it otherwise."""
        with answering(context):
            try:
                return self._callers.judge(call, rule, proofs, context)
            except ElastableError as error:
                if rule.role is Role.ADMINISTRATOR:
                    audit(call, self._callers.named(context), context, "", f"refused: {error}")
                if isinstance(error, Unauthenticated):  # without its name: nothing was read of the call
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
                raise


def _not_served(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def at_end_of(context: grpc.ServicerContext, do: Callable[[], None]) -> None:
    """Calls `do()` once the call has ended, however it does."""
    if not context.add_callback(do):  # its client is gone already
        do()


def _parent_of(context: grpc.ServicerContext) -> str:
    """The span that a client says the call belongs to; "": none."""
    shown = [value for key, value in context.invocation_metadata() if key == TRACE_KEY]
    return shown[0] if len(shown) == 1 and isinstance(shown[0], str) else ""


def _within_span(handler: Handler, method: str, tracer: Tracer) -> Handler:
    """The handler, whose work is done within a span where the client says which one it belongs to."""
    behaviour = behaviour_of(handler)

    def traced(request: object, context: grpc.ServicerContext) -> object:
        with tracer.serving(method, parent) if (parent := _parent_of(context)) else nullcontext():
            return behaviour(request, context)

    return with_behaviour(handler, traced)


# The standard health service: what a server says of itself and of each of its services


NotReady = Callable[[], str | None]
"""Says why a service cannot do its work now; None: it can. It answers at once."""

_STOPPING = "the server is stopping"


class Health:
    """Asks the services of one server whether they are ready, each time that somebody wants to know.

    Args:
        services: Full name of each service -> what it says.
    """

    def __init__(self, services: Mapping[str, NotReady]) -> None:
        self._services = dict(services)
        self._stopping = False

    def stop(self) -> None:
        """Nothing is ready from now on."""
        self._stopping = True

    def not_ready(self) -> dict[str, str]:
        """Why services are not ready, by name; those that are ready are left out."""
        said = {name: _STOPPING if self._stopping else ask() for name, ask in self._services.items()}
        return {name: why for name, why in said.items() if why is not None}

    def handler(self) -> Handler:
        """Of `Check`. `Watch` is not served: it keeps calls open, and nothing needs it."""
        return grpc.unary_unary_rpc_method_handler(
            self._check, health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        )

    def _check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """SERVING: the service, or with an empty name each of them, is ready."""
        if request.service and request.service not in self._services:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return health_pb2.HealthCheckResponse()
        waiting = self.not_ready()
        serves = request.service not in waiting if request.service else not (waiting or self._stopping)
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if serves else status.NOT_SERVING)
