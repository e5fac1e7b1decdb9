"""What a store server does with pushes: checks them, keeps them, and makes versions of them as its owner says."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from elastable.embedding_store import errors
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.measures import CLOCK
from elastable.embedding_store.shards import server_contract
from elastable.embedding_store.shards.client_pushes import ClientPushes
from elastable.embedding_store.shards.ownership import LONGEST_NAME, Claim, ShardOwnership, refuse_other_position
from elastable.embedding_store.shards.version_sums import (
    check_parts,
    commit_of,
    measured,
    require_finite_sums,
    require_sequence,
    sum_pushes,
)
from elastable.embedding_store.tables.checks import MAX_VERSION

_PUSH_BYTES = 1 << 10  # of a push without rows: what names it takes memory, too
_WAITED_S = 30.0  # after it a push may have to be computed again, rather than that no other finds room
_VERSIONS_KEPT = 16  # that an asynchronous push outlives, beyond those that the pushes before it may make

_Name = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Held:
    push: server_contract.RowPush
    size: int
    since: int  # version of the store when it came
    at: float  # when it came


class PushBuffer:
    """Keeps synchronous pushes of one version, and the last asynchronous push of each sender, in bounded memory.

    Synchronous pushes of an earlier version go when the first of a later one comes. An asynchronous push goes when its
    sender sends the next one: it waits for the answer to one push before it computes another. The last push of a sender
    that died, or whose push its master refused, goes when its room is needed, once the others that are here could all
    have been committed, or half a minute has passed: without room there may be no next version. A push that went too
    early is computed again: whoever sums asks for what is `missing`.

    Not thread-safe.

    Args:
        most_bytes: Of arrays; what would not fit is refused.
        now: Seconds that never go back.
    """

    def __init__(self, most_bytes: int, now: Callable[[], float] = CLOCK.now) -> None:
        self._most_bytes, self._now = most_bytes, now
        self._version = -1  # of the synchronous pushes
        self._held: dict[_Name, _Held] = {}
        self._last: dict[str, int] = {}  # sequence of each sender's push that is here
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Of what is kept."""
        return self._bytes

    def holds(self, push: server_contract.RowPush) -> bool:
        """Whether a push of that name is here."""
        return (push.sender != "" or push.version == self._version) and _name_of(push) in self._held

    def last(self, sender: str) -> int:
        """The sequence of a sender's push that is here; 0: none is."""
        return self._last.get(sender, 0)

    def has_later(self, push: server_contract.RowPush) -> bool:
        """Whether the sender of an asynchronous push has sent another one since."""
        return push.sender != "" and self.last(push.sender) > push.micro_batch

    def add(self, push: server_contract.RowPush, version: int) -> None:
        """Keeps a push that is not here. Raises `NotReady` where there is no room for it now.

        Args:
            push: What to keep.
            version: Of the store.
        """
        rows = sum(each.indices.nbytes + each.values.nbytes for part in push.parts for each in part.values())
        size = _PUSH_BYTES + rows
        replaced = self._replaced_by(push)
        room = self._most_bytes - self._bytes + sum(self._held[name].size for name in replaced)
        if room < size:
            abandoned = self._abandoned(version, size - room, replaced)
            room += sum(self._held[name].size for name in abandoned)
            replaced += abandoned
        if room < size:
            raise errors.NotReady(
                f"the store server holds {self._most_bytes - room:,} bytes of gradients that wait for version "
                f"{version + 1}, and {size:,} more are above its limit of {self._most_bytes:,}: give it more with "
                "--gradient-bytes, or let fewer micro-batches make a version (--grads-to-wait)"
            )
        self._drop(replaced)
        if push.sender:
            self._last[push.sender] = push.micro_batch
        else:
            self._version = push.version
        self._held[_name_of(push)] = _Held(push, size, version, self._now())
        self._bytes += size

    def _replaced_by(self, push: server_contract.RowPush) -> list[_Name]:
        if push.sender:
            before = (push.sender, self.last(push.sender))
            return [before] if before in self._held else []
        return [] if push.version == self._version else [name for name in self._held if not name[0]]

    def _abandoned(self, version: int, size: int, but: Sequence[_Name]) -> list[_Name]:
        """Asynchronous pushes that nobody seems to wait for, the oldest first, until they make that much room."""
        waits_at_most, now = len(self._held) + _VERSIONS_KEPT, self._now()
        found: list[_Name] = []
        for name, held in self._held.items():
            old = version - held.since > waits_at_most or now - held.at > _WAITED_S
            if size > 0 and name[0] and name not in but and old:
                found.append(name)
                size -= held.size
        return found

    def _drop(self, names: Iterable[_Name]) -> None:
        for name in names:
            self._bytes -= self._held.pop(name).size
            self._last.pop(name[0], None)

    def missing(self, sums: server_contract.RowSums) -> tuple[int, ...]:
        """Those of the pushes in a sum, each once, that are not here."""
        there = bool(sums.sender) or sums.version == self._version
        numbers = dict.fromkeys(term.micro_batch for term in sums.terms)
        return tuple(number for number in numbers if not there or (sums.sender, number) not in self._held)

    def parts(self, sender: str) -> Mapping[int, Sequence[Mapping[str, server_contract.Slices]]]:
        """The parts of every push of a sender ("": of synchronous pushes), by micro-batch or sequence."""
        return {name[1]: held.push.parts for name, held in self._held.items() if name[0] == sender}

    def clear(self) -> None:
        """Forgets everything."""
        self._version, self._held, self._last, self._bytes = -1, {}, {}, 0


def _name_of(push: server_contract.RowPush) -> _Name:
    return push.sender, push.micro_batch


MOST_PARTS = 65
"""Parts of a loss that are divided each in its own way."""

_WAIT_S = 600.0  # of a commit for the one before it; the store gives up sooner


class Shard:
    """The store of a server, and the pushes that its next version is made of. Safe to use from many threads.

    Args:
        store: The rows. Only the owner changes it; of a parameter server, every client.
        most_bytes: Of pushes at once.
        saver: Saves the rows where the job keeps its checkpoints; None: they cannot be saved.
        url: Where the rows are, without a login; "": that is not said.
        clients: Of a parameter server: makes a version of each push. It has no owner then.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        most_bytes: int = 0,
        saver: server_contract.RowSaver | None = None,
        url: str = "",
        clients: ClientPushes | None = None,
    ) -> None:
        self.store, self.url, self.clients = store, url, clients
        self._saver = saver
        self.ownership = ShardOwnership()
        self._buffer = PushBuffer(most_bytes)
        self._pushing = threading.Lock()  # the buffer
        self._committing = threading.Lock()  # the version, and the sums of the next one
        self._summed: tuple[server_contract.RowSums, dict[str, TableUpdate]] | None = None  # the gradient made last

    @property
    def buffered_bytes(self) -> int:
        """Of pushes that are kept."""
        return self._buffer.bytes

    def status(self) -> server_contract.ShardStatus:
        """What it says of itself. Raises `ElastableError`: the store cannot be asked."""
        store = self.store
        tables = [store.table_statistics(name) for name in store.specs()]
        measures, flush = store.measures(), store.flush_status()
        return server_contract.ShardStatus(
            version=store.version(),
            rows=sum(table.rows for table in tables),
            bytes=sum(table.bytes or 0 for table in tables),
            wanted_rows=sum(measures.rows_wanted.values()),
            read_rows=sum(measures.rows_read.values()),
            flush_lag=flush.version - flush.flushed_version if flush is not None else 0,
            log_bytes=flush.log_bytes if flush is not None else 0,
            pushed_bytes=self.buffered_bytes,
            failure=(flush.failure or "") if flush is not None else "",
            store=self.url,
            commits=measures.commits,
        )

    def claim(self, secret: bytes, claim: Claim, first: bool) -> None:
        """As `ShardOwnership.take`, once a commit under way has ended.

        Pushes of another owner or job are forgotten, and what it had begun to save is given up.

        Raises:
            BadInput: by its tables the server has another number, or is one of another number of servers.
        """
        with self._alone():
            refuse_other_position(self.store.specs(), claim.number, claim.servers)
            before = self.ownership.claim
            same = before is not None and before.job == claim.job
            stays = not self.ownership.take(secret, claim, first) and same
            if not stays:
                with self._pushing:
                    self._buffer.clear()
                self._summed = None
                if self._saver is not None:
                    self._saver.abandon()

    def push_rows(self, push: server_contract.RowPush, session: bytes = b"") -> server_contract.RowPushReply:
        """As `ShardStore.push_rows` of a worker that shows `session`, or `ClientPushes.push`."""
        if self.clients is not None:
            return self.clients.push(push)
        outcome = self._judge(push, session)
        if outcome is None:
            self._check(push)
            with self._pushing:
                # Again: another worker, or another owner, may have been faster while the arrays were checked.
                if (outcome := self._judge(push, session)) is None:
                    self._buffer.add(push, self.store.version())
        return server_contract.RowPushReply(outcome or server_contract.RowPushOutcome.ACCEPTED)

    def _judge(self, push: server_contract.RowPush, session: bytes) -> server_contract.RowPushOutcome | None:
        claim = self.ownership.require_session(session, push.sender)
        if push.job != claim.job:
            raise errors.JobFailed(f"the store server is job {claim.job}'s; the push is of job {push.job}")
        if push.sender:
            require_sequence(push.sender, push.micro_batch, self._buffer.last(push.sender))
        if push.version < 0:
            raise errors.BadInput(f"push for version {push.version}: the first version is 0")
        version = self.store.version()
        # Whether an asynchronous push is too late, its master says, who knows what else is on its way.
        if (push.version < version and not push.sender) or self._buffer.has_later(push):
            return server_contract.RowPushOutcome.STALE
        if push.version > version:
            raise errors.FutureVersion(f"push for version {push.version}; the store server is at version {version}")
        return server_contract.RowPushOutcome.DUPLICATE if self._buffer.holds(push) else None

    def _check(self, push: server_contract.RowPush) -> None:
        if not 0 <= push.micro_batch <= MAX_VERSION or not 0 < len(push.parts) <= MOST_PARTS:
            raise errors.BadGradient(
                f"a push of micro-batch {push.micro_batch} with {len(push.parts)} parts: at most 65"
            )
        if len(push.sender) > LONGEST_NAME:
            raise errors.BadGradient(
                f"a push of a sender named by {len(push.sender)} characters: at most {LONGEST_NAME}"
            )
        if any(slices.row_squares is not None for part in push.parts for slices in part.values()):
            raise errors.BadGradient("row_squares are for a parameter server (elastable serve), which sums no pushes")
        if push.terms != server_contract.PushTerms():
            raise errors.BadInput("terms are for a parameter server (elastable serve): here the master says them")
        claim = self.ownership.claim
        finite = claim is None or not claim.may_overflow
        check_parts(specs := self.store.specs(), push.parts, finite)
        if push.sender and finite:
            require_finite_sums(specs, push.parts)

    def measure(self, sums: server_contract.RowSums) -> server_contract.Measured:
        """As `ShardStore.measure`."""
        with self._alone():
            refuse_other_version(self.store.version(), sums.version)
            if missing := self._missing(sums):
                return server_contract.Measured(missing=missing)
            return measured(self._sum(sums))

    def offer_rows(
        self, commit: server_contract.PushedCommit, most: int, ids: Mapping[str, tuple[int, int]]
    ) -> server_contract.RowOffers:
        """As `ShardServer.offer_rows`."""
        with self._alone():
            refuse_other_version(self.store.version(), commit.sums.version)
            if not commit.dropped and (missing := self._missing(commit.sums)):
                return server_contract.RowOffers(missing=missing)
            # Only the rows of the commit count.
            left = self.store.staying_rows(self._commit_of(replace(commit, clips={})))
        return server_contract.RowOffers(
            {table: server_contract.offer_of(rows, most, ids.get(table)) for table, rows in left.items()}
        )

    def commit(self, commit: server_contract.PushedCommit, secret: bytes) -> server_contract.Committed:
        """As `ShardStore.commit_pushed`, for the owner with that secret."""
        with self._alone():
            self.ownership.require(secret)  # here: another one may have claimed the server while this call waited
            if self.store.version() == commit.version:
                return server_contract.Committed(repeated=True)
            refuse_other_version(self.store.version(), commit.sums.version)
            if not commit.dropped and (missing := self._missing(commit.sums)):
                return server_contract.Committed(missing)
            rows = self._commit_of(commit)
            if self._saver is not None:
                self._saver.rows_changed(rows.updates)
            # In two halves: a version that has been staged and finished can be taken back.
            self.store.stage(rows)()
            self._summed = None
        return server_contract.Committed(tables=tuple(rows.updates))

    def take_back(self, version: int | None, secret: bytes) -> int:
        """As `EmbeddingStore.recover`, for the owner with that secret. Pushes of that version are kept."""
        with self._alone():
            self.ownership.require(secret)
            self._summed = None
            return self.store.recover(version)

    def reset_version(self, version: int, record: bytes | None) -> None:
        """As `EmbeddingStore.reset_version`."""
        with self._alone():
            self._summed = None
            self.store.reset_version(version, record)

    def take_changes(self, mark: bytes, base: bytes) -> server_contract.TakenChanges:
        """As `ShardStore.take_changes`."""
        with self._alone():
            return self._require_saver().take(mark, base)

    def save_rows(
        self, save: server_contract.RowSave, source: Snapshot, wait_s: float
    ) -> server_contract.SavedRows | None:
        """As `RowSaver.save`."""
        return self._require_saver().save(save, source, wait_s)

    def _require_saver(self) -> server_contract.RowSaver:
        if self._saver is None:
            raise errors.Unsupported("this store server was started without a way to write checkpoints")
        return self._saver

    def _missing(self, sums: server_contract.RowSums) -> tuple[int, ...]:
        with self._pushing:
            missing = self._buffer.missing(sums)
            if missing:
                return missing
            parts = self._buffer.parts(sums.sender)
        for term in sums.terms:
            if not 0 <= term.part < len(parts[term.micro_batch]):
                raise errors.BadInput(
                    f"part {term.part} of micro-batch {term.micro_batch}, whose push has {len(parts[term.micro_batch])}"
                )
        return ()

    def _commit_of(self, commit: server_contract.PushedCommit) -> Commit:
        return commit_of(commit, {} if commit.dropped else self._sum(commit.sums))

    def _sum(self, sums: server_contract.RowSums) -> dict[str, TableUpdate]:
        """The gradient of a version, summed once."""
        if self._summed is None or self._summed[0] != sums:
            with self._pushing:
                parts = self._buffer.parts(sums.sender)
            self._summed = sums, sum_pushes(sums, parts)
        return self._summed[1]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A commit whose sender lost the answer may come again while it is still being made."""
        if not self._committing.acquire(timeout=_WAIT_S):
            raise errors.DeadlineExceeded(f"waited {_WAIT_S:g} s for the commit before this one")
        try:
            yield
        finally:
            self._committing.release()
