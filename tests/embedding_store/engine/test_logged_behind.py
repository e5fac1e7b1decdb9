"""Commits that are logged on another thread: nobody sees the version before, but who asks for what is ahead."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import Commit, MemoryStore, RemoteSource, SharedMemoryStore, SharedSource, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import (
    DeadlineExceeded,
    ElastableError,
    FutureVersion,
    StoreBroken,
    StoreFailed,
    TakenOver,
    Unavailable,
)
from elastable.embedding_store.log.changes import Change, CommitImages
from tests.contracts.store_samples import create_tables
from tests.embedding_store.serving import serving
from tests.waiting import until

SPEC = TableSpec("t", 4, 100, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5))
IDS = np.arange(0, 100, 3)
WAIT_S = 60.0


class Gate(StoreHistory):
    """A history whose commits are appended once that is let through, or fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()
        self.failure: ElastableError | None = None

    def append(self, change: Change, version: int) -> None:
        if isinstance(change, CommitImages):
            self.waiting.set()
            assert self.open.wait(WAIT_S)
            if self.failure is not None:
                raise self.failure
        super().append(change, version)


def step(version: int) -> Commit:
    gradients = np.random.default_rng(version).normal(size=(len(IDS), SPEC.dim)).astype(np.float32)
    return Commit(version, {"t": TableUpdate(IDS, gradients)}, version - 1, {}, record=f"record {version}".encode())


def after(*versions: int) -> np.ndarray:
    """Rows of a store whose commits are logged nowhere."""
    with create_tables(MemoryStore(), SPEC) as store:
        for version in versions:
            store.commit(step(version))
        return store.lookup({"t": IDS})["t"]


def begun(store: MemoryStore, gate: Gate, version: int) -> Future[None]:
    """Begins a commit. Its append is under way, and waits."""
    gate.open.clear()
    gate.waiting.clear()
    logged = store.begin_commit(step(version))
    assert gate.waiting.wait(WAIT_S)
    return logged


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "log")
    yield gate
    gate.open.set()


def opened(held: ExitStack, gate: Gate, timeout_s: float = WAIT_S) -> SharedMemoryStore:
    store = held.enter_context(SharedMemoryStore(2, timeout_s=timeout_s))
    held.callback(gate.open.set)  # before the store is closed, which waits for what is being logged
    store.keep_history(gate)
    store.create_table(SPEC)
    store.commit(step(1))
    attached(held, store, ahead=True)
    until(lambda: store.attachments.attached)
    return store


def attached(held: ExitStack, store: MemoryStore, ahead: bool) -> SharedSource:
    server = held.enter_context(serving(store))
    remote = RemoteSource(server.address, WAIT_S)
    return held.enter_context(SharedSource(remote, threads=1, required=True, ahead=ahead))


def test_every_call_but_the_version_waits_until_it_is_logged(held: ExitStack, gate: Gate) -> None:
    store = opened(held, gate, timeout_s=0.1)
    logged = begun(store, gate, 2)
    assert store.version() == 1
    assert not store.wait_for_version(2, 0.01)
    calls: Sequence[Callable[[], object]] = (
        lambda: store.lookup({"t": IDS}),
        lambda: store.lookup({"t": IDS}, 1),
        lambda: store.lookup({"t": IDS}, 2),
        lambda: store.pin(),
        lambda: store.commit(step(2)),
        lambda: store.row_count("t"),
    )
    for call in calls:
        with pytest.raises(DeadlineExceeded):
            call()
    gate.open.set()
    logged.result(WAIT_S)
    assert (store.version(), store.record()) == (2, b"record 2")
    assert store.wait_for_version(2, 0.0)
    np.testing.assert_array_equal(store.lookup({"t": IDS}, 2)["t"], after(1, 2))


def test_who_asks_for_the_version_ahead_reads_its_rows_from_shared_memory(held: ExitStack, gate: Gate) -> None:
    store = opened(held, gate)
    ahead, behind = attached(held, store, ahead=True), attached(held, store, ahead=False)
    for source in (ahead, behind):
        np.testing.assert_array_equal(source.lookup({"t": IDS}, 1)["t"], after(1))
    logged = begun(store, gate, 2)
    assert ahead.wait_for_version(2, WAIT_S)
    np.testing.assert_array_equal(ahead.lookup_when({"t": IDS}, 2, WAIT_S)["t"], after(1, 2))
    assert not behind.wait_for_version(2, 0.01)
    with ThreadPoolExecutor(2) as others:
        named, current = others.submit(behind.lookup, {"t": IDS}, 2), others.submit(ahead.lookup, {"t": IDS})
        for found in (named, current):
            assert not found.done()
        gate.open.set()
        for found in (named, current):
            np.testing.assert_array_equal(found.result(WAIT_S)["t"], after(1, 2))
    logged.result(WAIT_S)


def test_a_version_that_cannot_be_logged_is_ahead_no_more_once_it_is_taken_back(held: ExitStack, gate: Gate) -> None:
    store = opened(held, gate)
    source = attached(held, store, ahead=True)
    assert source.version() == 1
    gate.failure = StoreFailed("the disk is full")
    logged = begun(store, gate, 2)
    assert source.wait_for_version(2, WAIT_S)
    gate.open.set()
    with pytest.raises(StoreFailed, match="full"):
        logged.result(WAIT_S)
    with pytest.raises(Unavailable, match="version 2 is not logged"):
        store.lookup({"t": IDS})
    gate.failure = None
    assert store.recover(1) == 0
    assert store.version() == 1
    with pytest.raises(FutureVersion):
        source.lookup({"t": IDS}, 2)
    np.testing.assert_array_equal(source.lookup({"t": IDS}, 1)["t"], after(1))


@pytest.mark.parametrize("failure", [Unavailable("it is away"), TakenOver("another process owns the store")], ids=str)
def test_rows_that_could_not_be_logged_are_withdrawn(held: ExitStack, gate: Gate, failure: ElastableError) -> None:
    store = opened(held, gate)
    source = attached(held, store, ahead=True)
    np.testing.assert_array_equal(source.lookup({"t": IDS}, 1)["t"], after(1))
    gate.failure = failure
    logged = begun(store, gate, 2)
    np.testing.assert_array_equal(source.lookup_when({"t": IDS}, 2, WAIT_S)["t"], after(1, 2))
    gate.open.set()
    with pytest.raises(type(failure)):
        logged.result(WAIT_S)
    assert store.version() == 1
    assert not source.wait_for_version(2, 0.01)
    with pytest.raises((Unavailable, StoreBroken)):
        store.lookup({"t": IDS}, 2)
    if isinstance(failure, TakenOver):  # whose workers get no version after it
        with pytest.raises(ElastableError):
            store.begin_commit(step(3))
        assert not source.wait_for_version(3, 0.01)


def test_rows_that_moved_since_the_version_before_are_read_once_it_is_logged(held: ExitStack, gate: Gate) -> None:
    store = opened(held, gate)
    store.create_table(TableSpec("grows", 4, optimizer=OptimizerSpec.of("sgd", learning_rate=0.5)))
    source = attached(held, store, ahead=True)
    few, many = np.arange(3), np.arange(100_000)
    gate.open.clear()

    def grows(version: int, ids: np.ndarray) -> Commit:
        gradients = np.full((len(ids), 4), version, np.float32)
        return Commit(version, {"grows": TableUpdate(ids, gradients)}, version - 1, {})

    gate.open.set()
    store.commit(grows(2, few))
    before = source.lookup({"grows": few}, 2)["grows"]
    gate.open.clear()
    with ThreadPoolExecutor(1) as thread:
        gate.waiting.clear()
        logged = thread.submit(store.begin_commit, grows(3, many))
        assert gate.waiting.wait(WAIT_S)
        assert not source.wait_for_version(3, 0.01)
        gate.open.set()
        logged.result(WAIT_S).result(WAIT_S)
    np.testing.assert_array_equal(source.lookup_when({"grows": few}, 3, WAIT_S)["grows"], before - np.float32(1.5))


def test_a_commit_while_the_store_is_being_closed_is_logged_or_refused(held: ExitStack, gate: Gate) -> None:
    store = opened(held, gate)
    begun(store, gate, 2)
    closing = threading.Thread(target=store.close)
    closing.start()
    gate.open.set()
    version = 2
    while True:  # at any moment of closing it either is logged or fails, and the lock is free afterwards
        try:
            store.begin_commit(step(version + 1)).result(WAIT_S)
        except (StoreFailed, StoreBroken):
            break
        version += 1
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert store.version() in (version, version - 1)


def test_the_same_commit_is_logged_once_after_a_failure(held: ExitStack, gate: Gate, tmp_path: Path) -> None:
    store = opened(held, gate)
    gate.failure = Unavailable("it is away")
    logged = begun(store, gate, 2)
    gate.open.set()
    with pytest.raises(Unavailable):
        logged.result(WAIT_S)
    gate.failure = None
    retried = step(2)
    with pytest.raises(FutureVersion):  # another commit, which takes the first one back, and is of version 3
        store.begin_commit(step(3))
    store.begin_commit(retried).result(WAIT_S)
    store.begin_commit(step(3)).result(WAIT_S)
    store.close()
    with MemoryStore() as again:
        again.keep_history(StoreHistory(tmp_path / "log"))
        assert (again.version(), again.record()) == (3, b"record 3")
        np.testing.assert_array_equal(again.lookup({"t": IDS})["t"], after(1, 2, 3))


def test_closing_waits_for_what_is_being_logged(held: ExitStack, gate: Gate, tmp_path: Path) -> None:
    store = opened(held, gate)
    begun(store, gate, 2)
    threading.Timer(0.05, gate.open.set).start()
    store.close()
    with MemoryStore() as again:
        again.keep_history(StoreHistory(tmp_path / "log"))
        assert again.version() == 2
        np.testing.assert_array_equal(again.lookup({"t": IDS})["t"], after(1, 2))


def test_a_version_that_nobody_can_read_ahead_is_logged_at_once(tmp_path: Path) -> None:
    for store in (MemoryStore(), SharedMemoryStore()):
        with store:
            store.keep_history(StoreHistory(tmp_path / type(store).__name__))
            store.create_table(SPEC)
            logged = store.begin_commit(step(1))
            assert (logged.done(), store.version()) == (True, 1)


def test_a_store_without_a_log_has_committed_when_it_returns() -> None:
    with create_tables(MemoryStore(), SPEC) as store:
        logged = store.begin_commit(step(1))
        assert store.version() == 1
        logged.result(WAIT_S)
        np.testing.assert_array_equal(store.lookup({"t": IDS})["t"], after(1))
