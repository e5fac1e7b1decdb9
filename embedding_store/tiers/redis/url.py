"""Where a Redis store is, read from its URL, and how to log in."""

import math
import os
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qsl, unquote

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.checked_files import read_secret
from elastable.embedding_store.support.store_url import TIER_OPTIONS, unknown_option
from elastable.embedding_store.tiers.redis.schema import (
    DEFAULT_NAMESPACE,
    DEFAULT_PARTITIONS,
    check_namespace,
    check_partitions,
)

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel")
DEFAULT_PORT, DEFAULT_SENTINEL_PORT = 6379, 26379
DEFAULT_DEADLINE_S = 10.0
_OPTIONS = ("namespace", "partitions", "deadline", "ca", "service")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`redis[s][+sentinel]://[[user]:password@]host[:port][,host[:port]...][/db][?option=value&...]`.

    Attributes:
        seeds: Servers to ask first; of a Cluster any of its nodes. With `+sentinel` the Sentinels.
        username: Of AUTH; "" for the default user. Where the URL has no login, both are those of the environment
            (`elastable.embedding_store.tiers.redis.url`).
        password: Of AUTH; "" for none. In no message, in no `repr`.
        service: By which the Sentinels know the master; "": there are none, and the seeds are the servers.
        sentinel_login: User and password of the Sentinels, from the environment; "" for none.
        db: Of SELECT; most Clusters have only 0.
        tls: The scheme begins with `rediss`: connections, those to Sentinels too, are encrypted, certificates verified.
        ca: Path of the certificates to trust, PEM; "" for those of the system.
        namespace: What the store's keys begin with.
        partitions: Of the tables that this store creates, a power of two.
        deadline: Seconds that one operation may take, connecting and retries included.
    """

    seeds: tuple[Address, ...]
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    tls: bool = False
    ca: str = ""
    namespace: str = DEFAULT_NAMESPACE
    partitions: int = DEFAULT_PARTITIONS
    deadline: float = DEFAULT_DEADLINE_S
    service: str = ""
    sentinel_login: tuple[str, str] = field(default=("", ""), repr=False)

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        check_partitions(self.partitions)
        if not (math.isfinite(self.deadline) and self.deadline > 0):
            raise BadInput(f"deadline must be a number of seconds above 0, got {self.deadline}")

    @classmethod
    def parse(cls, url: str, deadline_s: float | None = None) -> Self:
        """Reads a URL.

        Args:
            url: See the class.
            deadline_s: Its deadline, where it names none; None: `DEFAULT_DEADLINE_S`.

        Raises:
            BadInput: it is no such URL; the message does not repeat a password.
        """
        # By hand: newer Pythons' urlsplit refuses an IPv6 address that is not the only host.
        scheme, _, rest = url.partition("://")
        if scheme not in SCHEMES:
            raise BadInput(
                f"scheme {scheme!r} is not of a Redis URL: write redis://host:port, rediss://host:port or, where "
                "Sentinels watch the server, redis+sentinel://host:port,host:port?service=name"
            )
        place, _, query = rest.partition("?")
        netloc, _, path = place.partition("/")
        login, at, hosts = netloc.rpartition("@")
        username, _, password = (unquote(part) for part in login.partition(":"))
        if not at:
            username, password = login_of_environment()
        if "#" in hosts or "@" in path:
            raise _login_cut()
        options = _options(query)
        deadline = DEFAULT_DEADLINE_S if deadline_s is None else deadline_s
        sentinels = scheme.endswith("+sentinel")
        if sentinels != bool(options.get("service")):
            raise BadInput(
                "option service of a Redis URL names the master that Sentinels watch: write it in a URL "
                "redis+sentinel://host:port,host:port?service=name, and in no other one"
            )
        return cls(
            seeds=tuple(_seed(host, DEFAULT_SENTINEL_PORT if sentinels else DEFAULT_PORT) for host in hosts.split(",")),
            username=username,
            password=password,
            service=options.get("service", ""),
            sentinel_login=login_of_environment("SENTINEL") if sentinels else ("", ""),
            db=_number("database", path.strip("/") or "0"),
            tls=scheme.startswith("rediss"),
            ca=options.get("ca", ""),
            namespace=options.get("namespace", DEFAULT_NAMESPACE),
            partitions=_number("partitions", options.get("partitions", str(DEFAULT_PARTITIONS))),
            deadline=_seconds(options["deadline"]) if "deadline" in options else deadline,
        )

    def __str__(self) -> str:
        """The URL without its login and options: fit for messages."""
        database = f"/{self.db}" if self.db else ""
        scheme = f"{'rediss' if self.tls else 'redis'}{'+sentinel' if self.service else ''}"
        service = f"?service={self.service}" if self.service else ""
        return f"{scheme}://{','.join(str(seed) for seed in self.seeds)}{database}{service}"


def redacted(url: str) -> str:
    """A store's URL, whatever its scheme, with `***` in the place of a login."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}" if at else url


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in sorted(set(options) - set(_OPTIONS)):
        if "@" in unquote(query):  # of the host that follows a password with a "?" in it
            raise _login_cut()
        if name in TIER_OPTIONS:
            raise BadInput(f"option {name!r} of a Redis URL is of a store of rows, which this one does not name")
        raise BadInput(f"Redis URL: {unknown_option(name, (*_OPTIONS, *TIER_OPTIONS))}")
    return options


def _login_cut() -> BadInput:
    """A character of a password has ended the login too early; the message repeats none of it."""
    return BadInput(
        "the user or password of a Redis URL holds a character that ends it: percent-encode them, as in %40 for @, "
        "%23 for #, %3F for ?, %2F for / and %25 for % (urllib.parse.quote(password, safe='') does), or leave them to "
        "ELASTABLE_REDIS_USER and ELASTABLE_REDIS_PASSWORD_FILE"
    )


def _seed(host: str, port: int) -> Address:
    has_port = ":" in host.rpartition("]")[2]
    return Address.parse(host if has_port else f"{host}:{port}")


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadInput(f"{name} of a Redis URL must be a whole number, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"deadline of a Redis URL must be a number of seconds, got {text!r}") from None


# User and password of Redis, from the environment of each process, and never from another process


FILE_VARIABLE = "ELASTABLE_REDIS_PASSWORD_FILE"


def login_of_environment(of: str = "REDIS") -> tuple[str, str]:
    """User and password of the servers, "" for what is not set.

    `ELASTABLE_REDIS_USER`, `ELASTABLE_REDIS_PASSWORD` and `ELASTABLE_REDIS_PASSWORD_FILE` count.

    Args:
        of: "SENTINEL": likewise of the Sentinels, which may have another login than the servers or none.

    Raises:
        BadInput: the password is given twice, or its file cannot be read.
    """
    password_name, file_name = f"ELASTABLE_{of}_PASSWORD", f"ELASTABLE_{of}_PASSWORD_FILE"
    user, password, file = (os.environ.get(name, "") for name in (f"ELASTABLE_{of}_USER", password_name, file_name))
    if password and file:
        raise BadInput(f"{password_name} and {file_name} are both set: set one of them")
    if file:
        try:
            password = read_secret(file, file_name).decode().strip("\r\n")
        except UnicodeDecodeError as error:
            raise BadInput(f"{file_name}: {file!r} is not UTF-8 text") from error
        if not password:
            raise BadInput(f"{file_name}: {file!r} is empty")
    return user, password
