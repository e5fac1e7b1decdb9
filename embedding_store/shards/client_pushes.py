"""Versions of a server without a job: each push of a client is one, made at once."""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import (
    BadGradient,
    BadInput,
    DeadlineExceeded,
    NotFinite,
    StoreBroken,
    VersionError,
)
from elastable.embedding_store.shards.ownership import LONGEST_NAME
from elastable.embedding_store.shards.server_contract import RowPush, RowPushOutcome, RowPushReply
from elastable.embedding_store.shards.version_sums import check_parts, table_updates
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.tables.checks import MAX_VERSION, require_from_outside

_MARK = b"elastable: pushes of clients\n"
_MOST_CLIENTS = 65_536  # whose sequences are remembered: of more, those that pushed last
_WAIT_S = 600.0  # of a push for those before it; the store gives up sooner


class ClientPushes:
    """Commits every push, named by its client and a sequence, with the learning rates of the tables' own optimizers.

    A store that keeps records keeps the clients' sequences with the version: a server that is started again knows every
    push that was committed. Safe to use from many threads.

    Args:
        store: Whose rows change.
        not_finite: What becomes of a push that holds NaN or Inf: "refuse" or "skip".
        deadline_s: How long a failing commit is tried again.
    """

    def __init__(self, store: EmbeddingStore, not_finite: str = "refuse", deadline_s: float = 60.0) -> None:
        self._store, self._not_finite, self._deadline_s = store, not_finite, deadline_s
        self._pushing = threading.Lock()
        self._sequences: OrderedDict[str, int] = OrderedDict()
        self._staged: tuple[tuple[str, int], Callable[[], None]] | None = None
        if store.keeps_records:
            store.recover()
            self._sequences.update(_sequences_in(store.record()))

    def push(self, push: RowPush) -> RowPushReply:
        """Commits a push, or knows it again.

        Raises:
            BadInput, BadIds, IdOutOfRange, BadGradient, TableNotFound, NotFinite: it cannot be used; nothing is
                changed.
            StaleVersion, FutureVersion: it is to make another version than the next one.
            StoreFailed, Unavailable: the store failed until the deadline.
        """
        _require_name(push)
        with self._alone():
            version = self._store.version()
            if push.micro_batch <= self._sequences.get(push.sender, 0):
                return RowPushReply(RowPushOutcome.DUPLICATE, version)
            if push.terms.staged:
                self._finish(push)
                return RowPushReply(RowPushOutcome.ACCEPTED, self._store.version())
            try:
                commit = self._commit_of(push, version)
            except NotFinite as error:
                if self._not_finite != "skip":
                    raise
                self._remember(push)
                return RowPushReply(RowPushOutcome.SKIPPED, version, str(error))
            if push.terms.stage:
                self._staged = (push.sender, push.micro_batch), self._store.stage(commit)
                return RowPushReply(RowPushOutcome.ACCEPTED, version)
            retry(partial(self._attempt, commit), f"commit of version {commit.version}", self._deadline_s)
            self._remember(push)
            return RowPushReply(RowPushOutcome.ACCEPTED, commit.version)

    def _finish(self, push: RowPush) -> None:
        if self._staged is None or self._staged[0] != (push.sender, push.micro_batch):
            raise VersionError("no push of that name is staged here: stage it again")
        apply, self._staged = self._staged[1], None
        apply()
        self._remember(push)

    def _commit_of(self, push: RowPush, version: int) -> Commit:
        terms = push.terms
        check_parts(self._store.specs(), push.parts, finite=not terms.summed)
        if not terms.summed and any(of.row_squares is not None for part in push.parts for of in part.values()):
            raise BadGradient("row_squares are for a push in which each id comes once (summed)")
        if terms.summed:
            if len(push.parts) != 1:
                raise BadGradient(f"a push of {len(push.parts)} parts, in which each id is to come once: join them")
            updates = {
                table: TableUpdate(slices.indices, slices.values, slices.row_squares)
                for table, slices in push.parts[0].items()
            }
        else:
            updates = table_updates(push.parts, [1.0] * len(push.parts))
        commit = Commit(
            version + 1 if terms.version is None else terms.version,
            updates,
            version if terms.step is None else terms.step,
            terms.learning_rates,
            self._record_with(push) if self._store.keeps_records else None,
            terms.ends_replay_epoch,
            terms.frozen,
            terms.time,
        )
        require_from_outside(commit)  # also finite numbers whose sum is none
        refuse_other_version(version, commit.version - 1)
        return commit

    def _attempt(self, commit: Commit) -> None:
        # Of an attempt before, only the answer may have been lost.
        store = self._store
        if store.version() != commit.version or (store.keeps_records and store.record() != commit.record):
            store.commit(commit)

    def _record_with(self, push: RowPush) -> bytes:
        return _MARK + json.dumps({**self._sequences, push.sender: push.micro_batch}).encode()

    def _remember(self, push: RowPush) -> None:
        self._sequences[push.sender] = push.micro_batch
        self._sequences.move_to_end(push.sender)
        while len(self._sequences) > _MOST_CLIENTS:
            self._sequences.popitem(last=False)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A push whose client lost the answer may come again while it is still being committed."""
        if not self._pushing.acquire(timeout=_WAIT_S):
            raise DeadlineExceeded(f"waited {_WAIT_S:g} s for the pushes before this one")
        try:
            yield
        finally:
            self._pushing.release()


def _require_name(push: RowPush) -> None:
    if push.job:
        raise BadInput(
            f"a push of job {push.job!r}: this is a parameter server of clients (elastable serve), and no store server "
            "of a job (elastable store)"
        )
    if not 0 < len(push.sender) <= LONGEST_NAME or not 0 < push.micro_batch <= MAX_VERSION:
        raise BadInput(
            f"a push named by {push.sender[:LONGEST_NAME]!r} and {push.micro_batch}: name it by a sender of at most "
            f"{LONGEST_NAME} characters, unique to a run of the program, and a micro_batch of 1, 2, 3, ..."
        )


def _sequences_in(record: bytes | None) -> dict[str, int]:
    """Client -> last sequence; none, where a job made the version. Raises `StoreBroken`: the record is malformed."""
    if record is None or not record.startswith(_MARK):
        return {}
    try:
        found = json.loads(record.removeprefix(_MARK))
        return {str(name): int(np.int64(last)) for name, last in found.items()}
    except MALFORMED as error:
        raise StoreBroken(f"what the store keeps of its clients' pushes is malformed: {error}") from error
