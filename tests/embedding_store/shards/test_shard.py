"""What changes while a call at a shard waits for its turn: the second look, under the lock, sees it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store import MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import ElastableError, JobFailed, NotJoined, NotReady, TakenOver
from elastable.embedding_store.shards import shard
from elastable.embedding_store.shards.ownership import Claim, session_of
from elastable.embedding_store.shards.server_contract import (
    PushedCommit,
    RowPush,
    RowPushOutcome,
    RowSums,
    Slices,
    SumTerm,
)
from elastable.embedding_store.shards.shard import PushBuffer, Shard
from elastable.embedding_store.shards.version_sums import check_parts

KEY, OURS, THEIRS = bytes(range(32)), b"our secret secret", b"their secret secret"
SESSION = session_of(KEY, "w")
COMMIT = PushedCommit(RowSums(0, (SumTerm(0, 0, 1.0),)), 0, {"t": 0.5})


@pytest.fixture
def owned() -> Iterator[Shard]:
    """Owned by the master of job "j"."""
    with MemoryStore(1) as store:
        store.create_table(TableSpec("t", 2, optimizer=OptimizerSpec.of("sgd")))
        owned = Shard(store, 1 << 20)
        owned.claim(OURS, Claim("us:1", "j", session_key=KEY), first=True)
        yield owned


def push(micro_batch: int = 0) -> RowPush:
    return RowPush("j", 0, micro_batch, ({"t": Slices(np.array([3]), np.ones((1, 2), np.float32))},))


def while_checked(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Has something happen while the arrays of the next push are checked."""

    def checking(*of: object) -> None:
        monkeypatch.setattr(shard, "check_parts", check_parts)
        happens()
        check_parts(*of)  # type: ignore[arg-type]

    monkeypatch.setattr(shard, "check_parts", checking)


def test_a_push_that_comes_twice_at_once_is_kept_once(owned: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    while_checked(monkeypatch, lambda: owned.push_rows(push(), SESSION))
    assert owned.push_rows(push(), SESSION).outcome is RowPushOutcome.DUPLICATE
    held = owned.buffered_bytes
    assert owned.push_rows(push(1), SESSION).outcome is RowPushOutcome.ACCEPTED
    assert owned.buffered_bytes == 2 * held


@pytest.mark.parametrize(
    ("claim", "kind"),
    [(Claim("them:2", "other", session_key=KEY), JobFailed), (Claim("them:2", "j", session_key=KEY[::-1]), NotJoined)],
    ids=["another job's", "of the same job"],
)
def test_a_push_is_not_kept_for_an_owner_who_came_meanwhile(
    owned: Shard, monkeypatch: pytest.MonkeyPatch, claim: Claim, kind: type[ElastableError]
) -> None:
    while_checked(monkeypatch, lambda: owned.claim(THEIRS, claim, first=True))
    with pytest.raises(kind):
        owned.push_rows(push(), SESSION)
    assert owned.buffered_bytes == 0


def test_an_owner_who_was_replaced_neither_commits_nor_takes_back(owned: Shard) -> None:
    """Whatever was asked before: its call may have waited meanwhile."""
    owned.push_rows(push(), SESSION)
    owned.claim(THEIRS, Claim("them:2", "j", session_key=KEY), first=True)
    for call in (lambda: owned.commit(COMMIT, OURS), lambda: owned.take_back(0, OURS)):
        with pytest.raises(TakenOver, match="belongs to them:2 now"):
            call()
    assert owned.store.version() == 0
    owned.push_rows(push(), SESSION)
    assert owned.commit(COMMIT, THEIRS).missing == ()
    assert owned.store.version() == 1


def test_pushes_of_workers_that_all_died_make_room_where_no_version_is_made() -> None:
    """All that began anew have other names, and none of their pushes replaces one that is here."""
    seconds = 0.0
    buffer = PushBuffer(3_200, lambda: seconds)
    for name in "abc":
        buffer.add(replace(push(1), sender=name), version=7)
        seconds += 1
    seconds = 30.0
    with pytest.raises(NotReady, match="--gradient-bytes"):
        buffer.add(replace(push(1), sender="anew"), version=7)
    seconds = 30.5
    buffer.add(replace(push(1), sender="anew"), version=7)
    assert [buffer.last(name) for name in ("a", "b", "c", "anew")] == [0, 1, 1, 1]
