"""Who may talk with whom over gRPC, and who may make which call: certificates, tokens, roles, proofs."""

import hmac
import os
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Self

import grpc
from google.protobuf import descriptor_pool

from elastable.embedding_store.errors import BadInput, PermissionDenied, Unauthenticated
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.checked_files import read_secret
from elastable.embedding_store.v1 import store_pb2

# Roles of callers, what they show within a job, and what each call needs of both


_REFLECTION = "/grpc.reflection."


class Role(IntEnum):
    """What a caller may do; each role may do what those before it may."""

    READER = 1
    """Reads tables, rows, versions, pins and the status of a job."""
    WORKER = 2
    """Takes part in a job; creates tables and changes rows of a server that allows writing."""
    ADMINISTRATOR = 3
    """Deletes rows and tables, sets versions back, stops a job."""

    @property
    def word(self) -> str:
        """As it is written in settings and messages: "reader", "worker" or "administrator"."""
        return self.name.lower()


class Proof(IntEnum):
    """What a caller shows within a job, besides its token or certificate."""

    NONE = 1
    """Nothing: its role decides."""
    SESSION = 2
    """That it has joined the job: the secret of its session with the master, or what the master gave it."""
    OWNER = 3
    """That it owns the store server: the secret of its claim."""


PROOF_KEYS = {Proof.SESSION: "elastable-session-bin", Proof.OWNER: "elastable-owner-bin"}
"""Metadata in which a proof is shown."""

Proofs = Mapping[Proof, Callable[[bytes], object]]
"""What a service of a job checks proofs with: raises where the bytes that a caller shows (b"": none) prove nothing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a call needs: the least role, and within a job a proof."""

    role: Role
    proof: Proof


def rule_of_call(method: str) -> Rule:
    """The rule of a call: its options `least_role` and `proof` in `proto/`; an administrator's where these are not set.

    Args:
        method: Full name, "/elastable.embedding_store.v1.Store/Lookup".
    """
    if method.startswith(_REFLECTION):
        return Rule(Role.READER, Proof.NONE)
    service, _, name = method.removeprefix("/").rpartition("/")
    try:
        said = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].GetOptions().Extensions
    except KeyError:
        return Rule(Role.ADMINISTRATOR, Proof.NONE)
    return Rule(Role(said[store_pb2.least_role] or Role.ADMINISTRATOR), Proof(said[store_pb2.proof] or Proof.OWNER))


def secret_of(context: grpc.ServicerContext, proof: Proof) -> bytes:
    """The bytes that a call shows as a proof; b"": none, or several."""
    key = PROOF_KEYS[proof]
    found = [value for name, value in context.invocation_metadata() if name == key and isinstance(value, bytes)]
    return found[0] if len(found) == 1 else b""


# Who makes a call: the role that its token, its certificate, or neither gives it


_TOKEN_KEY = "authorization"
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


class Callers:
    """Tells callers of one server apart.

    Where tokens are set a call shows one of them, and where roles of certificates are set its certificate has one; with
    both, the lower role counts.

    Args:
        credentials: The server's.
        anonymous: The role of callers who show no token. None: there are none where tokens or roles of certificates are
            set; elsewhere everybody is a worker.
    """

    def __init__(self, credentials: "Credentials", anonymous: Role | None = None) -> None:
        self._tokens = [(token.encode("ascii"), role) for token, role in credentials.tokens.items()]
        self._names = credentials.roles_of_names
        #: Whether nobody gets in without a token, or a certificate that has a role.
        self.asks = anonymous is None and bool(self._tokens or self._names)
        self._anonymous = Caller(Role.WORKER if anonymous is None else anonymous, "no token")

    def judge(self, call: str, rule: Rule, proofs: Proofs, context: grpc.ServicerContext) -> Caller:
        """The caller, where it may make a call: the one place that decides it, for every call of every service.

        Args:
            call: Its name, for messages.
            rule: What it needs.
            proofs: Of its service; a proof that is not among them is not asked for: outside a job the role decides.
            context: Of the call, of which no message has been read.

        Raises:
            Unauthenticated: as `of`.
            PermissionDenied: the caller's role is below the least one.
            ElastableError: what it shows proves nothing here.
        """
        caller = self.of(context)
        if caller.role < rule.role:
            why = f"{call} is for the role {rule.role.word}, and this caller's is {caller.role.word} ({caller.shown})"
            if not self.asks:
                needed = "ELASTABLE_TOKEN_FILE" if rule.role is Role.ADMINISTRATOR else "ELASTABLE_WORKER_TOKEN_FILE"
                why += f": start the server with {needed}, and give this client the same file"
            raise PermissionDenied(why)
        if (prove := proofs.get(rule.proof)) is not None:
            prove(secret_of(context, rule.proof))
        return caller

    def named(self, context: grpc.ServicerContext) -> str:
        """Role and mark of whoever makes a call in a few words, for logs."""
        try:
            caller = self.of(context)
        except Unauthenticated:
            return "a stranger"
        return f"{caller.role.word} ({caller.shown})"

    def knows(self, caller: Caller) -> bool:
        """Whether a caller has shown who it is."""
        return caller is not self._anonymous

    @property
    def knows_anybody(self) -> bool:
        """Whether a caller can show who it is."""
        return bool(self._tokens or self._names)

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
        shown = [value for key, value in context.invocation_metadata() if key == _TOKEN_KEY]
        if not shown and not self.asks:
            return self._anonymous
        if len(shown) != 1:
            raise Unauthenticated("it shows no token, and this server asks for one (ELASTABLE_TOKEN_FILE)")
        value = shown[0].encode() if isinstance(shown[0], str) else shown[0]
        scheme, _, token = value.partition(b" ")
        found = [role for known, role in self._tokens if hmac.compare_digest(token, known)]
        if not found or scheme.lower() != _SCHEME:
            raise Unauthenticated("its token is not this server's (ELASTABLE_TOKEN_FILE)")
        return Caller(found[0], f"the {found[0].word}'s token")

    def _by_name(self, context: grpc.ServicerContext) -> Caller:
        shown: Mapping[str, Iterable[bytes]] = context.auth_context()  # type: ignore[assignment]
        names = [
            name.decode("utf-8", "replace")
            for kind in ("x509_subject_alternative_name", "x509_common_name")
            for name in shown.get(kind, ())
        ]
        roles = [self._names[name] for name in names if name in self._names]
        if not roles and _ANY_NAME in self._names:
            roles = [self._names[_ANY_NAME]]
        listed = ", ".join(map(repr, names)) or "without a name"
        if not roles:
            raise Unauthenticated(f"its certificate ({listed}) has no role here (ELASTABLE_CERTIFICATE_ROLES)")
        return Caller(max(roles), f"certificate {listed}")


ENVIRONMENT = {
    "ELASTABLE_TLS_CA": "certificates (PEM) of the authority that the other end's certificate is verified by",
    "ELASTABLE_TLS_CERT": "this end's certificate (PEM), with what leads to the authority behind it",
    "ELASTABLE_TLS_KEY": "the certificate's private key (PEM), without a passphrase",
    "ELASTABLE_TOKEN_FILE": "file of the administrator's token: a secret that clients show to servers",
    "ELASTABLE_WORKER_TOKEN_FILE": "file of the workers' token: it trains, and neither drops tables nor stops jobs",
    "ELASTABLE_READER_TOKEN_FILE": "file of the readers' token: it looks rows and the status up, and changes nothing",
    "ELASTABLE_CERTIFICATE_ROLES": "roles of clients by the names in their certificates: NAME=ROLE,...; * is any name",
    "ELASTABLE_TLS_NAME": "the name in servers' certificates, where they are called by other names or addresses",
}
"""Variables that every process reads -> one line of help."""

GIVEN_TOKEN = "ELASTABLE_WORKER_TOKEN"
"""The workers' token itself, in the environment of workers and store servers that a command of Elastable starts."""

GIVEN_ADMINISTRATOR_TOKEN = "ELASTABLE_ADMINISTRATOR_TOKEN"
"""The administrator's token itself, in the environment of store servers that a command of Elastable starts."""

STORES_TOKEN = "ELASTABLE_STORES_TOKEN"
"""What workers that a command starts show to the store servers that it starts, in the workers' environment."""

_NAMES = dict(
    zip(
        ("ca", "certificate", "key", "token", "worker_token", "reader_token", "certificate_roles", "server_name"),
        ENVIRONMENT,
        strict=True,
    )
)
_TOKENS = {"token": Role.ADMINISTRATOR, "worker_token": Role.WORKER, "reader_token": Role.READER}
_ROLES = {role.word: role for role in Role}
_CERTIFICATE = (b"-----BEGIN CERTIFICATE-----", "a certificate in PEM (-----BEGIN CERTIFICATE-----)")
_KEY = (b"PRIVATE KEY-----", "a private key in PEM (-----BEGIN PRIVATE KEY-----)")
# What a header can carry, and well within what gRPC takes of all headers together.
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process shows to others and asks of them; nothing at all: plain text, for anyone who reaches the port.

    A client speaks TLS where `ca` is set, and then with no server that `ca` does not vouch for by `server_name`, or
    else by the name it is called by. A server speaks TLS, and nothing else, where `certificate` and `key` are set;
    with `ca` as well it takes only clients whose certificate `ca` vouches for. A server that has tokens takes no call
    without one of them, and the token shown is the caller's role. A client sends one token with every call, that of
    the highest role it has. Over plain text tokens are for one host alone.

    Attributes:
        ca: Path of the certificates to trust, PEM.
        certificate: Path of this end's certificate, PEM.
        key: Path of its private key, PEM, not encrypted.
        token: The administrator's secret, of printable ASCII without spaces, at most 4,096 characters. In no message,
            in no `repr`.
        worker_token, reader_token: Likewise, of those roles.
        certificate_roles: Of a server with `ca` and `certificate`: name in a client's certificate -> "reader", "worker"
            or "administrator"; "*" is any name. Empty: certificates say nothing of roles.
        server_name: The name that a client asks of every server's certificate; None: the name or address that it calls.

    Raises:
        BadInput: a file that cannot be read or is not of its kind, a key without its certificate or of another one, a
            token that no header can carry or that two roles have, a role that there is not; names the attribute, its
            variable and the file.
    """

    ca: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    token: str | None = field(default=None, repr=False)
    worker_token: str | None = field(default=None, repr=False)
    reader_token: str | None = field(default=None, repr=False)
    certificate_roles: Mapping[str, str] = field(default_factory=dict)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if self.ca is not None:
            _require_authority(Path(self.ca))
        if (self.certificate is None) != (self.key is None):
            given, missing = ("key", "certificate") if self.certificate is None else ("certificate", "key")
            raise BadInput(
                f"{_named(given)} is {str(getattr(self, given))!r} and {_named(missing)} is not set: set both, or none"
            )
        if self.certificate is not None and self.key is not None:
            _require_pair(Path(self.certificate), Path(self.key))
        seen: dict[str, str] = {}
        for name in _TOKENS:
            token = getattr(self, name)
            if token is not None:
                _require_token(token, _named(name))
                if token in seen:
                    raise BadInput(f"{_named(seen[token])} and {_named(name)} are one secret: give each role its own")
                seen[token] = name
        for name, role in self.certificate_roles.items():
            if not name or role not in _ROLES:
                raise BadInput(
                    f"{_named('certificate_roles')}: {name!r} has the role {role!r}: write NAME=ROLE, "
                    f"where ROLE is one of {', '.join(_ROLES)}"
                )

    @property
    def tokens(self) -> dict[str, Role]:
        """Tokens that a server takes -> the role of who shows them; the highest role first."""
        return {token: role for name, role in _TOKENS.items() if (token := getattr(self, name)) is not None}

    @property
    def sent_token(self) -> str | None:
        """The token that a client sends: that of the highest role."""
        return next(iter(self.tokens), None)

    @property
    def roles_of_names(self) -> dict[str, Role]:
        """Names in clients' certificates -> their roles."""
        return {name: _ROLES[role] for name, role in self.certificate_roles.items()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """What the variables of `ENVIRONMENT` say; one that is empty is as one that is not set.

        Raises:
            BadInput: as the class, and of a token file that cannot be read or is empty.
        """
        said = {name: environment.get(variable) or None for name, variable in _NAMES.items()}
        tokens = {name: None if said[name] is None else _token_of(Path(str(said[name])), name) for name in _TOKENS}
        tokens["token"] = environment.get(GIVEN_ADMINISTRATOR_TOKEN) or tokens["token"]
        tokens["worker_token"] = environment.get(GIVEN_TOKEN) or tokens["worker_token"]
        roles = _roles_of(said["certificate_roles"] or "")
        files = (said["ca"], said["certificate"], said["key"])
        return cls(*files, **tokens, certificate_roles=roles, server_name=said["server_name"])

    @classmethod
    def for_store_servers(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """What a worker shows to the store servers of its job: a separate token (`STORES_TOKEN`) where it has one.

        Raises:
            BadInput: as `from_environment`.
        """
        said, token = cls.from_environment(environment), environment.get(STORES_TOKEN)
        return replace(said, token=None, worker_token=token, reader_token=None) if token else said

    def for_client(self, address: Address) -> grpc.ChannelCredentials | None:
        """What a channel to `address` is secured by; None: plain text.

        Raises:
            BadInput: there is a certificate or a name and no authority to know the server by, or the token would leave
                this host in plain text.
        """
        if self.ca is not None:
            return grpc.ssl_channel_credentials(_read(self.ca, "ca"), *(self._pair() or (None, None)))
        for name in ("certificate", "server_name"):
            if (said := getattr(self, name)) is None:
                continue
            raise BadInput(
                f"{_named(name)} is {str(said)!r} and {_named('ca')} is not set: "
                f"a client cannot verify the server at {address}; name the authority of its certificate"
            )
        self._require_token_stays_here(address)
        return None

    def for_server(self, address: Address, insecure: bool = False) -> grpc.ServerCredentials | None:
        """What a server at `address` is secured by; None: plain text.

        Args:
            address: Where it listens.
            insecure: Whether it may be open to everybody who reaches it.

        Raises:
            BadInput: there is an authority for clients and no certificate to show them, the token would travel to
                `address` in plain text, or neither is there and others than this host can reach `address`.
        """
        pair = self._pair()
        if self.certificate_roles and (pair is None or self.ca is None):
            raise BadInput(
                f"{_named('certificate_roles')} is set, and a server at {address} that has not both {_named('ca')} and "
                f"{_named('certificate')} asks clients for no certificate"
            )
        if pair is not None:
            authority = None if self.ca is None else _read(self.ca, "ca")
            return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
        if self.ca is not None:
            raise BadInput(
                f"{_named('ca')} is {str(self.ca)!r} and {_named('certificate')} is not set: "
                f"a server at {address} needs a certificate, and {_named('key')}, to speak TLS"
            )
        self._require_token_stays_here(address)
        if not self.tokens and not insecure and not address.is_loopback:
            raise BadInput(
                f"a server at {address} would be open to everybody who reaches it, in plain text and without a token: "
                f"set {_named('certificate')}, {_named('key')} and {_named('token')}, listen on 127.0.0.1, or say "
                "--insecure (insecure=True) inside a network where you trust everybody"
            )
        return None

    def _pair(self) -> tuple[bytes, bytes] | None:
        """Key and certificate, as gRPC takes them."""
        if self.certificate is None or self.key is None:
            return None
        return _read(self.key, "key"), _read(self.certificate, "certificate")

    def _require_token_stays_here(self, address: Address) -> None:
        if self.tokens and not address.is_loopback:
            name = next(name for name in _TOKENS if getattr(self, name) is not None)
            raise BadInput(
                f"{_named(name)} would travel in plain text at {address}: set {_named('ca')} for clients, "
                f"{_named('certificate')} and {_named('key')} for servers, or stay on 127.0.0.1"
            )


def _named(name: str) -> str:
    """An attribute and its variable, for messages."""
    return f"{name} ({_NAMES[name]})"


def _read(path: str | os.PathLike[str], name: str) -> bytes:
    if name == "key":
        return read_secret(path, _named(name))
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{_named(name)}: {str(path)!r} cannot be read: {error.strerror or error}") from error


def _require_pem(path: Path, name: str, kind: tuple[bytes, str]) -> bytes:
    mark, meaning = kind
    text = _read(path, name)
    if mark not in text:
        raise BadInput(f"{_named(name)}: {str(path)!r} holds no PEM of its kind; it must be {meaning}")
    return text


def _require_authority(path: Path) -> None:
    _require_pem(path, "ca", _CERTIFICATE)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise BadInput(f"{_named('ca')}: {str(path)!r} is no PEM of certificates: {error.reason or error}") from error


def _require_pair(certificate: Path, key: Path) -> None:
    _require_pem(certificate, "certificate", _CERTIFICATE)
    if b"ENCRYPTED" in _require_pem(key, "key", _KEY):
        raise BadInput(f"{_named('key')}: {str(key)!r} is encrypted; nobody is there to be asked for its passphrase")
    try:
        # An empty password, so that OpenSSL asks nobody for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadInput(
                f"{_named('key')}: {str(key)!r} is not the key of {_named('certificate')} {str(certificate)!r}"
            ) from error
        raise BadInput(
            f"{_named('certificate')} {str(certificate)!r} with {_named('key')} {str(key)!r} "
            f"cannot be used: {error.reason or error}"
        ) from error


def _roles_of(text: str) -> dict[str, str]:
    """Roles by name, from `NAME=ROLE,NAME=ROLE`."""
    pairs = [pair.strip().rpartition("=") for pair in text.split(",") if pair.strip()]
    names = [name.strip() for name, _, _ in pairs]
    if len(set(names)) < len(names):
        raise BadInput(f"{_named('certificate_roles')} is {text!r}: a name is in it twice")
    return {name: role.strip() for name, (_, _, role) in zip(names, pairs, strict=True)}


def _token_of(path: Path, name: str) -> str:
    """The token in a file, without white space around it."""
    variable = _NAMES[name]
    text = read_secret(path, variable).decode("ascii", "replace").strip()
    _require_token(text, f"{variable} {str(path)!r}")
    return text


def _require_token(token: str, name: str) -> None:
    if not token:
        raise BadInput(f"{name}: the token is empty; write a secret there, as `openssl rand -hex 32` makes one")
    if _TOKEN.fullmatch(token) is None:
        raise BadInput(
            f"{name}: the token of {len(token):,} characters cannot be sent; "
            "it must be 1 to 4,096 of printable ASCII without spaces"
        )
