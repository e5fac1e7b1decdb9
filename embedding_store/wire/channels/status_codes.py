"""The one translator between Elastable's errors and gRPC status codes."""

import logging
from urllib.parse import quote

import grpc

from elastable.embedding_store import errors
from elastable.embedding_store.errors import (
    DeadlineExceeded,
    ElastableError,
    PermissionDenied,
    StoreFailed,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from elastable.embedding_store.support.printable import printable

ERROR_KEY = "elastable-error"
"""Trailing metadata that carries the name of the error's class."""

_MAX_DETAILS = 4_000  # percent-encoded bytes; gRPC refuses metadata of more than 8 KiB
_LOG = logging.getLogger(__name__)

_CODES: dict[type[ElastableError], grpc.StatusCode] = {
    errors.BadInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.IdOutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.TableNotFound: grpc.StatusCode.NOT_FOUND,
    errors.SpecConflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.VersionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotJoined: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.StoreFailed: grpc.StatusCode.INTERNAL,
    errors.ShardAway: grpc.StatusCode.UNAVAILABLE,
    errors.ModelError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.CheckpointError: grpc.StatusCode.DATA_LOSS,
    errors.JobFailed: grpc.StatusCode.ABORTED,
    errors.ElastableError: grpc.StatusCode.UNKNOWN,
}
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)

# What gRPC's details say of a handshake that no repeat will mend -> why, for a person.
_DISTRUST = {
    "CERTIFICATE_VERIFY_FAILED": (
        "its certificate is not of the authority in ELASTABLE_TLS_CA (ca=), or it has expired or is not valid yet"
    ),
    "Hostname Verification Check failed": (
        "its certificate is not for that name or address: call it by one of the certificate's subject alternative "
        "names, or set ELASTABLE_TLS_NAME to one"
    ),
    "WRONG_VERSION_NUMBER": (
        "it speaks plain text and this client TLS: give the server ELASTABLE_TLS_CERT and ELASTABLE_TLS_KEY"
    ),
}
# A server that refuses a handshake closes the connection, as one that is just being stopped does: so this is said
# only at the deadline.
_CLOSED_AT_ONCE = ("failed to connect", "Socket closed")
_MAYBE_TLS = (
    "; it closes connections as they begin: perhaps it speaks TLS and this client does not (ELASTABLE_TLS_CA), "
    "or it asks for another certificate (ELASTABLE_TLS_CERT)"
)

_CLASSES: dict[str, type[ElastableError]] = {name: getattr(errors, name) for name in errors.__all__}


def status_code(kind: type[ElastableError]) -> grpc.StatusCode:
    """The status code of an error class: its own, or that of its nearest base."""
    return next(_CODES[base] for base in kind.__mro__ if base in _CODES)


def error_class(name: str) -> type[ElastableError] | None:
    """The class of that name in `elastable.embedding_store.errors`, None where there is none."""
    return _CLASSES.get(name)


class CallRefused(Exception):
    """A server has no room for a call now: RESOURCE_EXHAUSTED, which clients repeat until their deadline."""


class answering:  # noqa: N801 - reads as the `with` statement that it is for
    """Around a servicer's work: what it raises becomes the call's status, unless that is decided already.

    Args:
        context: Of the call; it is aborted, so nothing after the block runs.
    """

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or self._context.code() is not None:  # type: ignore[attr-defined]
            return
        if isinstance(error, ElastableError):
            known = next(base.__name__ for base in type(error).__mro__ if base.__name__ in _CLASSES)
            self._context.set_trailing_metadata(((ERROR_KEY, known),))
            self._context.abort(status_code(type(error)), _shortened(str(error)))
        if isinstance(error, grpc.RpcError):
            # The request stream broke: the client is gone, and nobody reads the answer.
            self._context.abort(grpc.StatusCode.CANCELLED, "the request stream broke")
        if isinstance(error, CallRefused):
            self._context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        if isinstance(error, Exception):
            _LOG.error("unexpected error while answering a call", exc_info=error)
            self._context.abort(grpc.StatusCode.INTERNAL, _shortened(f"{type(error).__name__}: {error}"))


class raising:  # noqa: N801 - as `answering`
    """Around a client's call: what gRPC raises becomes an `ElastableError`.

    Args:
        address, deadline_s, wait_s: As of `translated`.
    """

    __slots__ = ("_address", "_deadline_s", "_wait_s")

    def __init__(self, address: str, deadline_s: float, wait_s: float = 0.0) -> None:
        self._address = address
        self._deadline_s = deadline_s
        self._wait_s = wait_s

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, grpc.RpcError):
            raise translated(error, self._address, self._deadline_s, wait_s=self._wait_s) from error
        # gRPC's only sign for it; errors of our own that are ValueErrors pass.
        if isinstance(error, ValueError) and "closed channel" in str(error) and not isinstance(error, ElastableError):
            raise Unavailable(f"{self._address}: this connection was closed") from error


def translated(
    error: grpc.RpcError, address: str, deadline_s: float, before: str = "", wait_s: float = 0.0
) -> ElastableError:
    """The `ElastableError` of what a call ended with.

    Args:
        error: What gRPC raised.
        address: Of the server.
        deadline_s: The caller's deadline in seconds.
        before: The details of an attempt before it; "" for none.
        wait_s: Seconds that the server was asked to wait, on top of the deadline.
    """
    code, details, name = _parts(error)
    if name:
        return _CLASSES.get(name, ElastableError)(details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        # The last attempt may have had no time left to fail by itself.
        earlier = f"; before that it could not be reached{_explained(before)}" if before else ""
        waited = f" after the {wait_s:g} s that it was asked to wait" if wait_s else ""
        return DeadlineExceeded(f"{address} gave no answer within the deadline of {deadline_s:g} s{waited}{earlier}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unsupported(f"{address} does not serve this call ({details})")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated(f"{address} does not accept this client: {details}")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return PermissionDenied(f"{address} refuses: {details}")
    if distrust := _distrust(code, details):
        return Unauthenticated(f"no TLS with {address}: {distrust} ({details})")
    if code in _TRANSIENT:
        return Unavailable(f"{address} cannot be reached within the deadline of {deadline_s:g} s{_explained(details)}")
    return StoreFailed(f"{address} failed: {details or code}")


class NoAnswer(grpc.RpcError):
    """A call that ended well and without a message, as one of a killed server may: gRPC gives None for it."""


def is_transient_code(error: grpc.RpcError) -> bool:
    """True where the server was not reached, had no thread free, or stopped in mid-call, so that a repeat may help."""
    code, details, name = _parts(error)
    return not name and code in _TRANSIENT and not _distrust(code, details)


def details_of(error: grpc.RpcError) -> str:
    """What gRPC says of it."""
    return _parts(error)[1]


def _explained(details: str) -> str:
    """What gRPC says of a server that was not reached, and the likely cause where there is one."""
    return f"{_MAYBE_TLS if all(sign in details for sign in _CLOSED_AT_ONCE) else ''} ({details})"


def _distrust(code: grpc.StatusCode, details: str) -> str:
    """Why no TLS connection can come about; "" where gRPC tells of no such thing."""
    if code is not grpc.StatusCode.UNAVAILABLE:
        return ""
    return next((why for sign, why in _DISTRUST.items() if sign in details), "")


def _parts(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, str]:
    """Status code, details, and the class name that an Elastable server named ("" elsewhere)."""
    if not isinstance(error, grpc.Call):
        code = grpc.StatusCode.UNAVAILABLE if isinstance(error, NoAnswer) else grpc.StatusCode.UNKNOWN
        return code, str(error), ""
    metadata: dict[str, str | bytes] = dict(error.trailing_metadata() or ())
    details = "\n".join(printable(line, lines=False) for line in (error.details() or "").split("\n"))
    return error.code(), details, str(metadata.get(ERROR_KEY, ""))


def _shortened(message: str) -> str:
    """The message, cut where it would not fit into gRPC's metadata."""
    message = message.encode("utf-8", "replace").decode()
    if len(quote(message)) <= _MAX_DETAILS:
        return message
    end = min(len(message), _MAX_DETAILS)
    while len(quote(message[:end])) > _MAX_DETAILS:
        end = end * 9 // 10
    return f"{message[:end]}… ({len(message)} characters)"
