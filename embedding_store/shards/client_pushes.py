"""Versions of a server without a job: each push of a client is one, made at once."""

import json
import logging
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
    ElastableError,
    NotFinite,
    StoreBroken,
    TableNotFound,
    VersionError,
)
from elastable.embedding_store.shards.ownership import LONGEST_NAME
from elastable.embedding_store.shards.server_contract import PushTerms, RowPush, RowPushOutcome, RowPushReply
from elastable.embedding_store.shards.version_sums import check_parts, is_made, require_sequence, table_updates
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.tables.checks import (
    MAX_VERSION,
    require_finite_of,
    require_from_outside,
    require_not_ahead,
    require_numbers,
)

_LOG = logging.getLogger(__name__)
_MARK = b"elastable: pushes of clients\n"
_MOST_CLIENTS = 1_024  # whose sequences are remembered, in every version: of more, those that pushed last
_WAIT_S = 600.0  # of a push for those before it; the store gives up sooner


class ClientPushes:
    """Commits every push, named by its client and a sequence, with the learning rates of the tables' own optimizers.

    A store that keeps records keeps the clients' sequences with the version: a server that is started again knows the
    last push of each that was committed. Safe to use from many threads.

    Args:
        store: Whose rows change.
        not_finite: What becomes of a push that holds NaN or Inf: "refuse" or "skip".
        deadline_s: How long a failing commit is tried again.
    """

    def __init__(self, store: EmbeddingStore, not_finite: str = "refuse", deadline_s: float = 60.0) -> None:
        self._store, self._not_finite, self._deadline_s = store, not_finite, deadline_s
        self._pushing = threading.Lock()
        self._sequences: OrderedDict[str, int] = OrderedDict()
        self._skipped: dict[str, str] = {}  # clients whose last push was, and why
        self._staged: tuple[tuple[str, int], int, Callable[[], None]] | None = None  # at which version
        self._unfinished: tuple[RowPush, Commit] | None = None  # whose deadline has passed
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
            version, last = self._store.version(), self._sequences.get(push.sender, 0)
            require_sequence(push.sender, push.micro_batch, last)
            if push.micro_batch < last:
                return RowPushReply(RowPushOutcome.STALE, version)
            if push.micro_batch == last:
                why = self._skipped.get(push.sender)
                outcome = RowPushOutcome.DUPLICATE if why is None else RowPushOutcome.SKIPPED
                return RowPushReply(outcome, version, why or "")
            self._refuse_rows_of_a_job()
            if push.terms.staged:
                self._finish(push)
                return RowPushReply(RowPushOutcome.ACCEPTED, self._store.version())
            try:
                commit = self._commit_of(push, version)
            except NotFinite as error:
                if self._not_finite != "skip":
                    raise
                self._remember(push)
                self._skipped[push.sender] = str(error)
                return RowPushReply(RowPushOutcome.SKIPPED, version, str(error))
            if push.terms.stage:
                self._staged = (push.sender, push.micro_batch), version, self._store.stage(commit)
                return RowPushReply(RowPushOutcome.ACCEPTED, version)
            self._unfinished = push, commit
            retry(partial(self._attempt, commit), f"commit of version {commit.version}", self._deadline_s)
            self._unfinished = None
            self._remember(push)
            return RowPushReply(RowPushOutcome.ACCEPTED, commit.version)

    def settle(self) -> None:
        """Tries again what failed until its deadline: readers wait for it where it could not be logged."""
        if self._unfinished is not None and self._pushing.acquire(blocking=False):
            try:
                if self._unfinished is not None:
                    push, commit = self._unfinished
                    self._attempt(commit)
                    self._unfinished = None
                    self._remember(push)
            except ElastableError as error:
                _LOG.warning("version %d cannot be committed: %s", commit.version, error)
            finally:
                self._pushing.release()

    @property
    def record(self) -> bytes | None:
        """What the store keeps with a version; None: it keeps nothing."""
        return _MARK + json.dumps(self._sequences, ensure_ascii=False).encode() if self._store.keeps_records else None

    def _refuse_rows_of_a_job(self) -> None:
        record = self._store.record() if self._store.keeps_records else None
        if record is not None and not record.startswith(_MARK):
            raise BadInput(
                f"the rows here are a job's, at version {self._store.version()}, and it could not go on after a push: "
                "copy them to another store (repartition), or have an administrator make them yours (ResetVersion)"
            )

    def _finish(self, push: RowPush) -> None:
        if push.terms != PushTerms(staged=True) or any(push.parts):
            raise BadInput("a push that is `staged` has neither parts nor other terms: those it was staged with count")
        if self._staged is None or self._staged[0] != (push.sender, push.micro_batch):
            raise VersionError("no push of that name is staged here: stage it again")
        _, version, apply = self._staged
        self._staged = None
        if self._store.version() != version:
            raise VersionError(f"another push made version {version + 1} meanwhile: stage it again")
        apply()
        self._remember(push)

    def _commit_of(self, push: RowPush, version: int) -> Commit:
        terms = push.terms
        wanted = version + 1 if terms.version is None else terms.version
        step = version if terms.step is None else terms.step
        require_numbers(Commit(wanted, {}, step, terms.learning_rates, time=terms.time))
        refuse_other_version(version, wanted - 1)
        if terms.time is not None:
            require_not_ahead(terms.time, "a push")
        specs = self._store.specs()
        for table in (*terms.learning_rates, *terms.frozen):
            if table not in specs:
                known = ", ".join(sorted(specs)) or "none"
                raise TableNotFound(f"terms of table {table!r}, which is not there (tables: {known})")
        check_parts(specs, push.parts, finite=False)
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
            for part in push.parts:
                for table, slices in part.items():
                    require_finite_of(table, slices.indices, slices.values)
            updates = table_updates(push.parts, [1.0] * len(push.parts))
        commit = Commit(
            wanted,
            updates,
            step,
            terms.learning_rates,
            self._record_with(push) if self._store.keeps_records else None,
            terms.ends_replay_epoch,
            terms.frozen,
            terms.time,
        )
        require_from_outside(commit)  # also finite numbers whose sum is none
        return commit

    def _attempt(self, commit: Commit) -> None:
        if not is_made(self._store, commit):
            self._store.commit(commit)

    def _record_with(self, push: RowPush) -> bytes:
        others = {name: last for name, last in self._sequences.items() if name != push.sender}
        return _MARK + json.dumps({**others, push.sender: push.micro_batch}, ensure_ascii=False).encode()

    def _remember(self, push: RowPush) -> None:
        self._sequences[push.sender] = push.micro_batch
        self._sequences.move_to_end(push.sender)
        self._skipped.pop(push.sender, None)
        while len(self._sequences) > _MOST_CLIENTS:
            self._skipped.pop(self._sequences.popitem(last=False)[0], None)

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
    size = len(push.sender.encode())
    if not 0 < size <= LONGEST_NAME or not 0 < push.micro_batch <= MAX_VERSION:
        raise BadInput(
            f"a push named by a sender of {size} bytes and micro_batch {push.micro_batch}: name it by a sender of 1 to "
            f"{LONGEST_NAME} bytes, unique to a run of the program, and a micro_batch of 1, 2, 3, ..."
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
