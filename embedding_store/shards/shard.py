"""What a store server does with pushes: checks them, keeps them, and makes versions of them as its owner says."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import (
    BadGradient,
    BadInput,
    DeadlineExceeded,
    FutureVersion,
    JobFailed,
    NotFinite,
    NotReady,
    TableNotFound,
    Unsupported,
)
from elastable.embedding_store.rows.checks import MAX_VERSION, require_finite_of, require_gradients, require_ids
from elastable.embedding_store.shards.ownership import LONGEST_NAME, Claim, ShardOwnership
from elastable.embedding_store.shards.position import refuse_other_position
from elastable.embedding_store.shards.push_buffer import PushBuffer
from elastable.embedding_store.shards.row_pushes import (
    Committed,
    Measured,
    PushedCommit,
    RowOffers,
    RowPush,
    RowPushOutcome,
    RowSums,
    Slices,
)
from elastable.embedding_store.shards.row_saving import RowSave, RowSaver, SavedRows, TakenChanges
from elastable.embedding_store.shards.shared_budget import offer_of
from elastable.embedding_store.shards.sums.version_sums import Pushes, VersionSums

__all__ = ["MOST_PARTS", "Shard"]

MOST_PARTS = 65
"""Parts of a loss that are divided each in its own way."""

_WAIT_S = 600.0  # of a commit for the one before it; the store gives up sooner


class Shard:
    """The store of a server, and the pushes that its next version is made of. Safe to use from many threads.

    Args:
        store: The rows. Only the owner changes it.
        most_bytes: Of pushes at once.
        saver: Saves the rows where the job keeps its checkpoints; None: they cannot be saved.
        url: Where the rows are, without a login; "": that is not said.
    """

    def __init__(self, store: EmbeddingStore, most_bytes: int, saver: RowSaver | None = None, url: str = "") -> None:
        self.store, self.url = store, url
        self._saver = saver
        self.ownership = ShardOwnership()
        self._buffer = PushBuffer(most_bytes)
        self._pushing = threading.Lock()  # the buffer
        self._committing = threading.Lock()  # the version, and the sums of the next one
        self._sums = VersionSums(self._pushes)

    @property
    def buffered_bytes(self) -> int:
        """Of pushes that are kept."""
        return self._buffer.bytes

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
                self._sums.forget()
                if self._saver is not None:
                    self._saver.abandon()

    def push_rows(self, push: RowPush) -> RowPushOutcome:
        """As `ShardStore.push_rows`."""
        if (judged := self._judge(push)) is not None:
            return judged
        self._check(push)
        with self._pushing:
            # Again: another worker may have been faster while the arrays were checked.
            if (judged := self._judge(push)) is not None:
                return judged
            self._buffer.add(push, self.store.version())
        return RowPushOutcome.ACCEPTED

    def _judge(self, push: RowPush) -> RowPushOutcome | None:
        claim = self.ownership.claim
        if claim is None or not claim.job:
            raise NotReady("no job has claimed the store server since it was started")
        if push.job != claim.job:
            raise JobFailed(f"the store server is job {claim.job}'s; the push is of job {push.job}")
        version = self.store.version()
        # Whether an asynchronous push is too late, its master says, who knows what else is on its way.
        if (push.version < version and not push.sender) or self._buffer.has_later(push):
            return RowPushOutcome.STALE
        if push.version > version:
            raise FutureVersion(f"push for version {push.version}; the store server is at version {version}")
        return RowPushOutcome.DUPLICATE if self._buffer.holds(push) else None

    def _check(self, push: RowPush) -> None:
        if not 0 <= push.micro_batch <= MAX_VERSION or not 0 < len(push.parts) <= MOST_PARTS:
            raise BadGradient(f"a push of micro-batch {push.micro_batch} with {len(push.parts)} parts: at most 65")
        if len(push.sender) > LONGEST_NAME:
            raise BadGradient(f"a push of a sender named by {len(push.sender)} characters: at most {LONGEST_NAME}")
        specs, claim = self.store.specs(), self.ownership.claim
        finite = claim is None or not claim.may_overflow
        for part in push.parts:
            for table, slices in part.items():
                if table not in specs:
                    known = ", ".join(sorted(specs)) or "none"
                    raise TableNotFound(f"gradient for table {table!r}, which is not there (tables: {known})")
                _check_slices(specs[table], slices, finite)

    def measure(self, sums: RowSums) -> Measured:
        """As `ShardStore.measure`."""
        with self._alone():
            refuse_other_version(self.store.version(), sums.version)
            if missing := self._missing(sums):
                return Measured(missing=missing)
            return self._sums.measured(sums)

    def offer_rows(self, commit: PushedCommit, most: int, ids: Mapping[str, tuple[int, int]]) -> RowOffers:
        """As `ShardServer.offer_rows`."""
        with self._alone():
            refuse_other_version(self.store.version(), commit.sums.version)
            if not commit.dropped and (missing := self._missing(commit.sums)):
                return RowOffers(missing=missing)
            left = self.store.staying_rows(self._sums.unclipped(commit))
        return RowOffers({table: offer_of(rows, most, ids.get(table)) for table, rows in left.items()})

    def commit(self, commit: PushedCommit, secret: bytes) -> Committed:
        """As `ShardStore.commit_pushed`, for the owner with that secret."""
        with self._alone():
            self.ownership.require(secret)  # here: another one may have claimed the server while this call waited
            if self.store.version() == commit.version:
                return Committed(repeated=True)
            refuse_other_version(self.store.version(), commit.sums.version)
            if not commit.dropped and (missing := self._missing(commit.sums)):
                return Committed(missing)
            rows = self._sums.to_commit(commit)
            if self._saver is not None:
                self._saver.rows_changed(rows.updates)
            # In two halves: a version that has been staged and finished can be taken back.
            self.store.stage(rows)()
            self._sums.forget()
        return Committed(tables=tuple(rows.updates))

    def take_back(self, version: int | None, secret: bytes) -> int:
        """As `EmbeddingStore.recover`, for the owner with that secret. Pushes of that version are kept."""
        with self._alone():
            self.ownership.require(secret)
            self._sums.forget()
            return self.store.recover(version)

    def reset_version(self, version: int, record: bytes | None) -> None:
        """As `EmbeddingStore.reset_version`."""
        with self._alone():
            self._sums.forget()
            self.store.reset_version(version, record)

    def take_changes(self, mark: bytes, base: bytes) -> TakenChanges:
        """As `ShardStore.take_changes`."""
        with self._alone():
            return self._require_saver().take(mark, base)

    def save_rows(self, save: RowSave, source: Snapshot, wait_s: float) -> SavedRows | None:
        """As `RowSaver.save`."""
        return self._require_saver().save(save, source, wait_s)

    def _require_saver(self) -> RowSaver:
        if self._saver is None:
            raise Unsupported("this store server was started without a way to write checkpoints")
        return self._saver

    def _missing(self, sums: RowSums) -> tuple[int, ...]:
        with self._pushing:
            missing = self._buffer.missing(sums)
            if missing:
                return missing
            parts = self._buffer.parts(sums.sender)
        for term in sums.terms:
            if not 0 <= term.part < len(parts[term.micro_batch]):
                raise BadInput(
                    f"part {term.part} of micro-batch {term.micro_batch}, whose push has {len(parts[term.micro_batch])}"
                )
        return ()

    def _pushes(self, sums: RowSums) -> Pushes:
        with self._pushing:
            return self._buffer.parts(sums.sender)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A commit whose sender lost the answer may come again while it is still being made."""
        if not self._committing.acquire(timeout=_WAIT_S):
            raise DeadlineExceeded(f"waited {_WAIT_S:g} s for the commit before this one")
        try:
            yield
        finally:
            self._committing.release()


def _check_slices(spec: TableSpec, slices: Slices, finite: bool) -> None:
    require_gradients(spec, len(require_ids(spec, slices.indices)), slices.values)
    if not finite:
        return
    try:
        require_finite_of(spec.name, slices.indices, slices.values)
    except NotFinite:
        # Named as the job's workers number its rows, and not as this shard of the table does.
        whole = slices.indices * spec.origin.id_stride + spec.origin.id_offset
        require_finite_of(spec.name, whole, slices.values)
        raise
