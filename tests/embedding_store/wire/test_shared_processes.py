"""Owner and readers of shared rows as real processes: torn by nothing, killed on either side."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import pytest

from elastable.embedding_store import Commit, RemoteSource, RemoteStore, SharedMemoryStore, SharedSource, TableUpdate
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import Unavailable
from tests.contracts.store_samples import commit, create_tables
from tests.embedding_store.serving import serving
from tests.embedding_store.wire.test_shared_source import mapped
from tests.waiting import until

pytestmark = pytest.mark.process

DIM = 16
WAIT_S = 60
SPECS = [
    TableSpec("fixed", DIM, 4_000, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd")),
    TableSpec("any", DIM, None, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd")),
]


@contextmanager
def process(work: Callable[..., None], *arguments: object) -> Iterator[tuple[Any, Pipe]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    started = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    started.start()
    try:
        yield started, ours
    finally:
        started.kill()
        started.join(60)


def heard(pipe: Pipe) -> Any:
    assert pipe.poll(WAIT_S), "the other process said nothing"
    return pipe.recv()


def own(pipe: Pipe) -> None:
    with SharedMemoryStore(2) as store, serving(store, writable=True) as server:
        pipe.send(server.address)
        pipe.poll(600)


def read(pipe: Pipe, address: str, seed: int) -> None:
    random, looked, newest = np.random.default_rng(seed), 0, 0.0
    with SharedSource(RemoteSource(address, 60), threads=1, required=True) as source:
        pipe.send("reading")
        while not pipe.poll(0):
            ids = {spec.name: random.integers(0, 4_000, random.integers(1, 3_000)) for spec in SPECS}
            rows = np.concatenate(list(source.lookup(ids).values()))
            if (rows != rows[0, 0]).any() or rows[0, 0] < newest:
                pipe.send(f"torn: {rows.min()} to {rows.max()} after {newest}")
                return
            newest = float(rows[0, 0])
            looked += 1
        pipe.send((source.attached, looked, newest))


def read_for_ever(pipe: Pipe, address: str) -> None:
    with SharedSource(RemoteSource(address, 60), threads=2, required=True) as source:
        ids = np.arange(4_000)
        source.lookup({"fixed": ids})
        pipe.send("reading")
        while True:
            source.lookup({"fixed": ids, "any": ids})


def one_more(store: SharedMemoryStore) -> None:
    """Every row of both tables, those of 'any' also beyond all that there were, gets the version's number."""
    version = store.version()
    grown = np.arange(4_000 + 200 * version)
    updates = {"fixed": np.arange(4_000), "any": grown}
    ups = {name: TableUpdate(ids, np.full((len(ids), DIM), -1, np.float32)) for name, ids in updates.items()}
    store.commit(Commit(version + 1, ups, version, dict.fromkeys(ups, 1.0)))


def shared_names() -> list[str]:
    """What of ours has a name in shared memory; other processes have names there, too."""
    return sorted(name for name in os.listdir("/dev/shm") if "elastable" in name)


@pytest.fixture
def owned() -> Iterator[tuple[SharedMemoryStore, str]]:
    with create_tables(SharedMemoryStore(2), *SPECS) as store, serving(store) as server:
        yield store, server.address


def test_readers_beside_a_writer_see_whole_versions_of_a_growing_store(
    owned: tuple[SharedMemoryStore, str],
) -> None:
    store, address = owned
    with ExitStack() as held:
        pipes = [held.enter_context(process(read, address, seed))[1] for seed in (1, 2)]
        assert [heard(pipe) for pipe in pipes] == ["reading"] * 2
        for _ in range(40):
            one_more(store)
        for pipe in pipes:
            pipe.send("enough")
        for pipe in pipes:
            attached, looked, newest = heard(pipe)
            assert attached
            assert looked
            assert newest <= 40


def test_a_killed_reader_leaves_the_store_as_it_was(owned: tuple[SharedMemoryStore, str]) -> None:
    store, address = owned
    names = shared_names()
    with process(read_for_ever, address) as (reader, pipe):
        assert heard(pipe) == "reading"
        for round_ in range(10):
            one_more(store)
            if round_ == 5:
                os.kill(reader.pid, signal.SIGKILL)
        reader.join(60)
    assert store.version() == 10
    assert (store.lookup({"fixed": np.arange(4_000)}, 10)["fixed"] == 10).all()
    with SharedSource(RemoteSource(address, 60), required=True) as source:
        assert (source.lookup({"fixed": np.arange(4_000)}, 10)["fixed"] == 10).all()
    assert shared_names() == names


def test_a_killed_owner_is_unavailable_within_the_deadline_and_leaves_nothing() -> None:
    names, held = shared_names(), mapped()  # of stores of other tests, which may be gone soon
    with process(own) as (owner, pipe):
        address = heard(pipe)
        with (
            process(wait_for_what_never_comes, address) as (_, waiting),
            RemoteStore(address, 60) as store,
            SharedSource(RemoteSource(address, 60), required=True) as source,
        ):
            assert heard(waiting) == "waiting"
            store.create_table(SPECS[0])
            commit(store, {"fixed": TableUpdate(np.arange(4_000), np.ones((4_000, DIM), np.float32))}, rate=1.0)
            before = source.lookup({"fixed": np.arange(4_000)}, 1)["fixed"]
            assert source.attached
            assert mapped() - held
            source._remote.connection.deadline_s = 1.0
            os.kill(owner.pid, signal.SIGKILL)
            owner.join(60)
            for ask in (
                lambda: source.lookup({"fixed": np.arange(4_000)}, 1),
                lambda: source.wait_for_version(2, 0.5),
                source.version,
            ):
                with pytest.raises(Unavailable, match=re.escape(address)):
                    ask()
            assert not source.attached
            assert heard(waiting) == "Unavailable"
            until(lambda: mapped() <= held)
            assert (before == -1).all()
    assert shared_names() == names


def wait_for_what_never_comes(pipe: Pipe, address: str) -> None:
    with SharedSource(RemoteSource(address, 60), required=True) as source:
        source._remote.connection.deadline_s = 1.0
        pipe.send("waiting")
        try:
            source.wait_for_version(9, 60.0)
        except Unavailable as error:
            pipe.send(type(error).__name__)
