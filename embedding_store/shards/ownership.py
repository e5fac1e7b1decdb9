"""Who owns a store server and joined its owner's job, which of how many servers it is, and where its rows went."""

import hmac
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, NotJoined, NotReady, PermissionDenied, StoreBroken, TakenOver

LEASE_S = 4.0
"""Seconds after which an owner that has not been heard of counts as gone; a job's master is heard of every second."""

LONGEST_NAME = 256
"""Characters of the name of a job, an owner or a sender."""

_SECRET_BYTES = range(16, 65)
_DIGEST_BYTES = 32
_UNCLAIMED = "no job has claimed the store server since it was started"


@dataclass(frozen=True, slots=True)
class Claim:
    """What an owner says of itself.

    Attributes:
        owner: host:process, for messages.
        job: Whose pushes are taken; "": nobody's yet.
        may_overflow: Whether pushes may hold NaN or Inf.
        number: Of the server among those of the job, from 0.
        servers: How many these are; 0: neither is said.
        session_key: Of a job, 16 to 64 random bytes: by these the server knows the job's workers (`session_of`).
    """

    owner: str
    job: str = ""
    may_overflow: bool = False
    number: int = 0
    servers: int = 0
    session_key: bytes = field(default=b"", repr=False)


def session_of(key: bytes, incarnation: str) -> bytes:
    """What a worker that joined a job shows to its store servers: an HMAC of its incarnation, and the incarnation.

    Args:
        key: Of the claim.
        incarnation: Of the worker.
    """
    name = incarnation.encode()
    return hmac.digest(key, name, "sha256") + name


class ShardOwnership:
    """The owner is the process that claimed the server last, known by a secret, for as long as it is heard of.

    Safe to use from many threads.

    Args:
        now: Monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._secret: bytes | None = None
        self._claim = Claim("")
        self._heard = 0.0

    @property
    def claim(self) -> Claim | None:
        """Of the current owner; None: nobody has claimed the server since it started."""
        return self._claim if self._secret is not None else None

    def take(self, secret: bytes, claim: Claim, first: bool) -> bool:
        """Makes the process that shows the secret the owner.

        Args:
            secret: 16 to 64 bytes.
            claim: What it says of itself.
            first: Whether it may replace another owner; else it has been the owner, and says so again.

        Returns:
            Whether another one, or nobody, was the owner before.

        Raises:
            TakenOver: it is not the first claim, and another process has become the owner.
            BadInput: a secret or a name that cannot be.
        """
        if len(secret) not in _SECRET_BYTES or not 0 < len(claim.owner) <= LONGEST_NAME:
            raise BadInput("a claim shows a secret of 16 to 64 bytes and names its owner, as host:process")
        if len(claim.job) > LONGEST_NAME:
            raise BadInput(f"a job's name has at most {LONGEST_NAME} characters")
        if claim.job and len(claim.session_key) not in _SECRET_BYTES:
            raise BadInput(
                "a claim for a job has a session_key of 16 to 64 bytes, by which workers that joined are known"
            )
        with self._lock:
            changes = self._secret is None or not hmac.compare_digest(self._secret, secret)
            if self._secret is not None and changes and not first:
                raise TakenOver(f"the store server belongs to {self._claim.owner} now")
            self._secret, self._claim, self._heard = secret, claim, self._now()
        return changes

    def require(self, secret: bytes) -> None:
        """Returns where the caller is the owner, who is heard of so.

        Raises:
            BadInput: it shows nothing.
            NotReady: nobody has claimed the server since it started; claim it (again).
            TakenOver: another process is the owner.
        """
        if not secret:
            raise BadInput(
                "this call is for the owner of the store server: show the secret of a claim (elastable-owner-bin)"
            )
        with self._lock:
            if self._secret is None:
                raise NotReady(_UNCLAIMED)
            if not hmac.compare_digest(self._secret, secret):
                raise TakenOver(f"the store server belongs to {self._claim.owner} now")
            self._heard = self._now()

    def require_session(self, session: bytes, sender: str = "") -> Claim:
        """The claim, where a worker that has joined its job shows what it was given (`session_of`).

        Args:
            session: As it is shown.
            sender: In whose name the call is; "": in that of whoever joined.

        Raises:
            NotReady: no job has claimed the server since it started.
            NotJoined: it is not of the master that owns the server now: join (again).
            PermissionDenied: the name is another worker's.
        """
        claim = self.claim
        if claim is None or not claim.job:
            raise NotReady(_UNCLAIMED)
        incarnation = session[_DIGEST_BYTES:].decode("utf-8", "replace")
        if not hmac.compare_digest(session_of(claim.session_key, incarnation), session):
            raise NotJoined(
                f"the caller has not joined job {claim.job}, whose master owns the store server: show what Join gives "
                "(elastable-session-bin), or join again"
            )
        if sender not in ("", incarnation):
            raise PermissionDenied(f"worker {sender!r} is another session's: this one is of worker {incarnation!r}")
        return claim

    def live_owner(self, but: bytes = b"") -> str:
        """The owner, if it has been heard of lately and is not the one with the secret `but`; else ""."""
        with self._lock:
            if self._secret is None or hmac.compare_digest(self._secret, but):
                return ""
            return self._claim.owner if self._now() - self._heard < LEASE_S else ""


# Which of how many store servers a server is: its tables know, and whoever claims it says so


_NAMED = 3  # tables in a message


def position_of(spec: TableSpec) -> tuple[int, int] | None:
    """Number of the server that holds this shard of a table, and how many there are; None: it was not split."""
    origin, whole = spec.origin, spec.origin.table
    if whole is None:
        return None
    if origin.id_stride == whole.origin.id_stride * origin.shards:
        return (origin.id_offset - whole.origin.id_offset) // whole.origin.id_stride, origin.shards
    return (origin.first_column - whole.origin.first_column) // -(-whole.dim // origin.shards), origin.shards


def refuse_other_position(specs: Mapping[str, TableSpec], number: int, servers: int) -> None:
    """Refuses a claim of this server as another one than its tables say.

    Args:
        specs: The server's tables.
        number: As which server it is claimed, counted from 0.
        servers: Of how many; 0: the claim does not say.

    Raises:
        BadInput: it is another server, or there is no such number.
    """
    if not 0 <= number < max(servers, 1):
        raise BadInput(f"a claim as store server {number} of {servers}: they are numbered from 0")
    if not servers:
        return
    others = {
        name: found for name, spec in specs.items() if (found := position_of(spec)) not in (None, (number, servers))
    }
    if others:
        held, of = next(iter(others.values())) or (0, 0)
        names = ", ".join(sorted(others)[:_NAMED])
        raise BadInput(
            f"it is store server {held} of {of} by its tables ({names}), and is named as number {number} of {servers}: "
            "the order and the number of servers are part of the tables. Write --stores in the order of before; "
            "elastable store rescale moves rows to another number of servers"
        )


# What a store server keeps in the place of a version's record while its rows are moved to other servers, and after


_MARK = b"elastable: rows of a job are moved\n"
_MOST_ADDRESSES = 10_000


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of a job on their way from some store servers to others.

    Attributes:
        old: Addresses of the servers that had them, in order.
        new: Addresses of those that get them.
        gone: True at an old server: its rows are at the new ones. False at a new one: they may be there in part.
        record: Of the version, which the new server keeps until it has all rows.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    gone: bool
    record: bytes | None = None

    def to_bytes(self) -> bytes:
        """As a record of a version."""
        fields = {"old": self.old, "new": self.new, "gone": self.gone, "record": self.record is not None}
        return _MARK + json.dumps(fields).encode() + b"\n" + (self.record or b"")

    @classmethod
    def from_bytes(cls, record: bytes | None) -> Self | None:
        """What `to_bytes` gave; None for the record of a version. Raises `StoreBroken`: it is malformed."""
        if record is None or not record.startswith(_MARK):
            return None
        text, _, rest = record.removeprefix(_MARK).partition(b"\n")
        try:
            fields = json.loads(text)
            old, new = (tuple(map(str, fields[name])) for name in ("old", "new"))
            if not 0 < max(len(old), len(new)) <= _MOST_ADDRESSES:
                raise ValueError(f"{len(old)} and {len(new)} addresses")
            return cls(old, new, bool(fields["gone"]), rest if fields["record"] else None)
        except MALFORMED as error:
            raise StoreBroken(f"what the store server says about where its rows went is malformed: {error}") from error

    @property
    def command(self) -> str:
        """What moves the rows."""
        return f"elastable store rescale --from {','.join(self.old)} --to {','.join(self.new)}"


def refuse_moved(address: str, record: bytes | None) -> None:
    """Raises `BadInput` where a store server is none of a job any more, or not yet; it says what to write instead."""
    move = Move.from_bytes(record)
    if move is None:
        return
    if move.gone:
        raise BadInput(
            f"the rows of store server {address} have moved: write --stores {','.join(move.new)} instead of "
            f"--stores {','.join(move.old)}"
        )
    raise BadInput(
        f"store server {address} does not have all rows yet, as moving them broke off: end it with `{move.command}`, "
        f"or go on where they were, with --stores {','.join(move.old)}"
    )
