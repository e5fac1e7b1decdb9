"""Who makes a call: the role that its token, its certificate, or neither gives it."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc

from elastable.embedding_store.errors import Unauthenticated
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.access.roles import Role

__all__ = ["Caller", "Callers"]

_KEY = "authorization"
_SCHEME = b"bearer"
_ANY_NAME = "*"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever makes a call.

    Attributes:
        role: What it may do.
        shown: What it is known by, for messages and logs; no secret.
    """

    role: Role
    shown: str

    @property
    def told(self) -> str:
        """Role and mark in a few words, for logs."""
        return f"{self.role.word} ({self.shown})"


class Callers:
    """Tells callers of one server apart.

    Where tokens are set a call shows one of them, and where roles of certificates are set its certificate has one; with
    both, the lower role counts.

    Args:
        credentials: The server's.
        anonymous: The role of callers who show no token. None: there are none where tokens or roles of certificates are
            set; elsewhere everybody is a worker.
    """

    def __init__(self, credentials: Credentials, anonymous: Role | None = None) -> None:
        self._tokens = [(token.encode("ascii"), role) for token, role in credentials.tokens.items()]
        self._names = credentials.roles_of_names
        #: Whether nobody gets in without a token, or a certificate that has a role.
        self.asks = anonymous is None and bool(self._tokens or self._names)
        self._anonymous = Caller(Role.WORKER if anonymous is None else anonymous, "no token")

    def of(self, context: grpc.ServicerContext) -> Caller:
        """Who makes the call of `context`.

        Raises:
            Unauthenticated: it does not show what this server asks for.
        """
        if not (self._tokens or self._names):
            return self._anonymous
        by_token = self._by_token(context) if self._tokens else None
        by_name = self._by_name(context) if self._names else None
        if by_token is None or by_name is None:
            return by_token or by_name or self._anonymous
        return Caller(min(by_token.role, by_name.role), f"{by_token.shown}, {by_name.shown}")

    def _by_token(self, context: grpc.ServicerContext) -> Caller:
        shown = [value for key, value in context.invocation_metadata() if key == _KEY]
        if not shown and not self.asks:
            return self._anonymous
        if len(shown) != 1:
            raise Unauthenticated("it shows no token, and this server asks for one (ELASTABLE_TOKEN_FILE)")
        scheme, _, token = _as_bytes(shown[0]).partition(b" ")
        found = [role for known, role in self._tokens if hmac.compare_digest(token, known)]
        if not found or scheme.lower() != _SCHEME:
            raise Unauthenticated("its token is not this server's (ELASTABLE_TOKEN_FILE)")
        return Caller(found[0], f"the {found[0].word}'s token")

    def _by_name(self, context: grpc.ServicerContext) -> Caller:
        shown: Mapping[str, Iterable[bytes]] = context.auth_context()  # type: ignore[assignment]
        names = [
            *_texts(shown.get("x509_subject_alternative_name", ())),
            *_texts(shown.get("x509_common_name", ())),
        ]
        roles = [self._names[name] for name in names if name in self._names]
        if not roles and _ANY_NAME in self._names:
            roles = [self._names[_ANY_NAME]]
        told = ", ".join(map(repr, names)) or "without a name"
        if not roles:
            raise Unauthenticated(f"its certificate ({told}) has no role here (ELASTABLE_CERTIFICATE_ROLES)")
        return Caller(max(roles), f"certificate {told}")


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode("utf-8", "replace") for value in values]
