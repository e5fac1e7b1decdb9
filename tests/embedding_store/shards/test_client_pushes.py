"""Pushes of clients of a parameter server: each is a version once, whatever is sent again or started again."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import Commit, EmbeddingStore, InitializerSpec, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import (
    BadGradient,
    BadIds,
    BadInput,
    ElastableError,
    FutureVersion,
    IdOutOfRange,
    NotFinite,
    StoreBroken,
    StoreFailed,
    TableNotFound,
    VersionError,
)
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.shards import client_pushes
from elastable.embedding_store.shards.client_pushes import ClientPushes
from elastable.embedding_store.shards.server_contract import PushTerms, RowPush, RowPushOutcome, Slices
from elastable.embedding_store.shards.shard import Shard

SPEC = TableSpec(
    "t",
    2,
    vocabulary_size=9,
    initializer=InitializerSpec("zeros"),
    optimizer=OptimizerSpec.of("sgd", learning_rate=0.5),
)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as made:
        made.create_table(SPEC)
        yield made


def push(number: int, ids: list[int], value: float = 1.0, sender: str = "c", table: str = "t") -> RowPush:
    slices = Slices(np.array(ids, np.int64), np.full((len(ids), 2), value, np.float32))
    return RowPush("", 0, number, ({table: slices},), sender)


def rows(store: EmbeddingStore, ids: list[int]) -> list[float]:
    return [float(value) for value in store.lookup({"t": np.array(ids, np.int64)})["t"][:, 0]]


def test_a_push_is_a_version_once(store: MemoryStore) -> None:
    shard = Shard(store, clients=ClientPushes(store))
    first = shard.push_rows(push(1, [3, 3, 4]))
    assert (first.outcome, first.version) == (RowPushOutcome.ACCEPTED, 1)
    assert rows(store, [3, 4, 5]) == [-1.0, -0.5, 0.0]
    again = shard.push_rows(push(1, [3, 3, 4]))
    assert (again.outcome, again.version) == (RowPushOutcome.DUPLICATE, 1)
    store.create_table(TableSpec("late", 2))
    assert shard.push_rows(push(2, [7], table="late")).version == 2
    assert rows(store, [3]) == [-1.0]


TWICE = PushTerms(summed=True)
SQUARES = Slices(np.array([1]), np.ones((1, 2), np.float32), np.ones(1, np.float32))
REFUSED: dict[str, tuple[RowPush, type[ElastableError], str]] = {
    "another table": (push(1, [1], table="u"), TableNotFound, "'u'"),
    "an id outside": (push(1, [1, 9]), IdOutOfRange, "id 9 at position 1"),
    "not finite": (push(1, [1], np.nan), NotFinite, "'t'"),
    "a sum that is not": (push(1, [1, 1], 3e38), NotFinite, "'t'"),
    "an id twice": (replace(push(1, [1, 1]), terms=TWICE), BadIds, "id 1 appears at positions 0 and 1"),
    "parts": (replace(push(1, [1]), parts=push(1, [1]).parts * 2, terms=TWICE), BadGradient, "2 parts"),
    "squares of what is summed here": (replace(push(1, [1]), parts=({"t": SQUARES},)), BadGradient, "row_squares"),
    "a job": (replace(push(1, [1]), job="j"), BadInput, "this is a parameter server of clients"),
    "no name": (push(1, [1], sender=""), BadInput, "name it by a sender"),
    "a long name": (push(1, [1], sender="無" * 86), BadInput, "a sender of 258 bytes .* of 1 to 256 bytes"),
    "a sequence of 0": (push(0, [1]), BadInput, "a micro_batch of 1, 2, 3"),
    "a sequence far ahead": (push(2**32 + 1, [1]), BadInput, "push 4294967297 of 'c', whose last one was 0"),
    "a rate of no table": (replace(push(1, [1]), terms=PushTerms(learning_rates={"u": 0.1})), TableNotFound, "'u'"),
    "a frozen table that is none": (replace(push(1, [1]), terms=PushTerms(frozen=("u",))), TableNotFound, "'u'"),
    "a later version": (replace(push(1, [1]), terms=PushTerms(3)), FutureVersion, "version 2 is not committed"),
    "a version of before": (replace(push(1, [1]), terms=PushTerms(0)), BadInput, "makes a version from 1"),
    "a rate": (replace(push(1, [1]), terms=PushTerms(learning_rates={"t": np.inf})), BadInput, "rate"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_changes_nothing(store: MemoryStore, what: str) -> None:
    pushes = ClientPushes(store)
    wrong, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        pushes.push(wrong)
    assert (store.version(), rows(store, [1])) == (0, [0.0])
    assert pushes.push(push(1, [1])).outcome is RowPushOutcome.ACCEPTED


def test_squares_come_with_ids_that_are_summed(store: MemoryStore) -> None:
    assert ClientPushes(store).push(replace(push(1, [1]), parts=({"t": SQUARES},), terms=TWICE)).version == 1
    assert rows(store, [1]) == [-0.5]


def test_a_staged_push_changes_nothing_before_it_is_finished(store: MemoryStore) -> None:
    pushes = ClientPushes(store)
    terms = PushTerms(1, summed=True, stage=True)
    assert pushes.push(replace(push(1, [3]), terms=terms)).version == 0
    assert rows(store, [3]) == [0.0]
    finish = RowPush("", 0, 1, (), "c", PushTerms(staged=True))
    with pytest.raises(VersionError, match="stage it again"):
        pushes.push(replace(finish, sender="another"))
    with pytest.raises(BadInput, match="neither parts nor other terms"):
        pushes.push(replace(finish, parts=push(1, [4]).parts))
    assert [pushes.push(finish).outcome.value for _ in range(2)] == ["accepted", "duplicate"]
    assert (store.version(), rows(store, [3])) == (1, [-0.5])


def test_a_staged_push_that_another_one_overtook_is_staged_again(store: MemoryStore) -> None:
    pushes = ClientPushes(store)
    pushes.push(replace(push(1, [3]), terms=PushTerms(summed=True, stage=True)))
    assert pushes.push(push(1, [4], sender="another")).version == 1
    finish = RowPush("", 0, 1, (), "c", PushTerms(staged=True))
    with pytest.raises(VersionError, match="stage it again"):
        pushes.push(finish)
    pushes.push(replace(push(1, [3]), terms=PushTerms(summed=True, stage=True)))
    assert pushes.push(finish).version == 2
    assert rows(store, [3, 4]) == [-0.5, -0.5]


def test_pushes_that_are_not_finite_can_be_skipped(store: MemoryStore) -> None:
    pushes = ClientPushes(store, "skip")
    skipped = pushes.push(push(1, [1], np.inf))
    assert (skipped.outcome, "'t'" in skipped.reason) == (RowPushOutcome.SKIPPED, True)
    assert pushes.push(push(1, [1], np.inf)) == skipped
    for wrong, error in (
        (replace(push(2, [1], np.nan), terms=PushTerms(9)), FutureVersion),
        (
            replace(push(2, [1], np.nan), parts=(*push(2, [1], np.nan).parts, *push(2, [1], table="u").parts)),
            TableNotFound,
        ),
    ):
        with pytest.raises(error):
            pushes.push(wrong)
    assert pushes.push(push(2, [1])).outcome is RowPushOutcome.ACCEPTED
    assert pushes.push(push(1, [1], np.inf)).outcome is RowPushOutcome.STALE
    assert store.version() == 1


def test_many_clients_lose_nothing(store: MemoryStore) -> None:
    pushes = ClientPushes(store)

    def client(name: str) -> None:
        for number in range(1, 21):
            pushes.push(push(number, [1], sender=name))
            pushes.push(push(number, [1], sender=name))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, "abcd"))
    assert store.version() == 80
    assert rows(store, [1]) == [-40.0]


def test_a_server_that_is_started_again_knows_every_push(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/rows"
    with open_store(url) as store:
        store.create_table(SPEC)
        pushes = ClientPushes(store)
        for number, sender in ((1, "a"), (2, "a"), (1, "b")):
            pushes.push(push(number, [1], sender=sender))
    with open_store(url) as store:
        pushes = ClientPushes(store)
        again = [pushes.push(push(number, [1], sender=name)) for number, name in ((2, "a"), (1, "b"), (3, "a"))]
        assert [(reply.outcome.value, reply.version) for reply in again] == [
            ("duplicate", 3),
            ("duplicate", 3),
            ("accepted", 4),
        ]
        assert rows(store, [1]) == [-2.0]
        store.reset_version(4, client_pushes._MARK + b"{")
        with pytest.raises(StoreBroken, match="clients' pushes is malformed"):
            ClientPushes(store)
        store.reset_version(4, b"the record of a job")
        with pytest.raises(BadInput, match="the rows here are a job's, at version 4"):
            ClientPushes(store).push(push(1, [1], sender="a"))
        store.reset_version(4, pushes.record)
        assert ClientPushes(store).push(push(3, [1], sender="a")).outcome is RowPushOutcome.DUPLICATE


def test_what_failed_until_its_deadline_is_tried_again_and_counts_once(tmp_path: Path) -> None:
    with open_store(f"memory?log={tmp_path}/log") as store:
        store.create_table(SPEC)
        pushes, commit = ClientPushes(store, deadline_s=0.0), store.commit

        def fail(commit: Commit) -> None:
            raise StoreFailed("the disk is full")

        store.commit = fail  # type: ignore[method-assign]
        with pytest.raises(StoreFailed):
            pushes.push(push(1, [1]))
        pushes.settle()
        store.commit = commit  # type: ignore[method-assign]
        pushes.settle()
        assert (store.version(), pushes.push(push(1, [1])).outcome) == (1, RowPushOutcome.DUPLICATE)


def test_clients_that_pushed_last_are_remembered(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_pushes, "_MOST_CLIENTS", 2)
    pushes = ClientPushes(store)
    for number in range(3):
        pushes.push(push(1, [1], sender=f"c{number}"))
        pushes.push(push(number + 1, [1], sender="often"))
    assert set(pushes._sequences) == {"c2", "often"}
