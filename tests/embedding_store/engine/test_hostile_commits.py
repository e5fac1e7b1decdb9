"""State, rows and versions as a hostile client sends them: each is taken whole, or refused and changes nothing.

Commits that are refused are part of the histories that every store goes through.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import MemoryStore, RemoteStore, RowBlock
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.errors import BadInput, StoreBroken
from tests.contracts.store_history import SPECS, TRAINED, commit_of, everything
from tests.contracts.store_samples import create_tables, int64
from tests.embedding_store.serving import serving

pytestmark = pytest.mark.process

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def client(held: ExitStack) -> RemoteStore:
    """Of a store behind a real port, at version 1."""
    store = create_tables(held.enter_context(MemoryStore(threads=1)), *SPECS.values())
    server = held.enter_context(serving(store, writable=True))
    store.commit(commit_of(1, [1, 2, 3], 0, TRAINED))
    return held.enter_context(RemoteStore(server.address, 60))


def test_decay_that_no_row_can_have_is_refused_and_commits_go_on(client: RemoteStore) -> None:
    before = everything(client)
    for table, state in (
        *(("decayed", TableState(None, logarithm)) for logarithm in (1e308, -1e308, 1e16, NAN, INF, -INF)),
        ("decayed", TableState(np.zeros(7, np.uint8))),
        ("rare", TableState(np.zeros(3, np.uint8))),
        ("rare", TableState(None, -0.5)),
    ):
        with pytest.raises(BadInput):
            client.put_table_state(table, state)
    assert everything(client) == before
    client.commit(commit_of(2, [1, 2], 1, TRAINED))


def test_the_largest_decay_that_is_taken_ends_no_commit() -> None:
    with create_tables(MemoryStore(threads=1), SPECS["decayed"]) as store:
        for version, logarithm in enumerate((1e15, -1e15), 1):
            store.put_table_state("decayed", TableState(None, logarithm))
            store.commit(commit_of(version, [1], 0, ["decayed"]))
            store.lookup({"decayed": np.arange(3)})


def test_touches_that_no_row_can_have_are_refused(client: RemoteStore) -> None:
    before, ones = everything(client), np.ones((8, 1), np.float32)
    for touches in ([-1, 1], [-(2**63), 1], [2**63 - 1, 1], [1, -1], [1, 2**32]):
        block = RowBlock(np.arange(10, 18), ones, ones[:, :0], np.array([touches] * 8, np.int64))
        with pytest.raises(BadInput, match=r"touches of id 10 \(position 0\)"):
            client.put("few", [block])
    assert everything(client) == before
    client.put("few", [replace(block, touches=np.array([[0, 1]] * 8, np.int64))])
    client.commit(commit_of(2, [1, 2, 3], 0, ["few"]))
    assert client.row_count("few") == 5


def test_a_version_after_which_none_can_come_is_refused(client: RemoteStore) -> None:
    before = everything(client)
    for version in (2**63 - 1, 2**53 + 1, -1, -(2**63)):
        with pytest.raises(BadInput, match="must not be negative or above"):
            client.reset_version(version)
    assert everything(client) == before
    client.commit(commit_of(2, [1, 2], 1, TRAINED))


def test_what_breaks_in_the_middle_nevertheless_is_said_ever_after(monkeypatch: pytest.MonkeyPatch) -> None:
    with create_tables(MemoryStore(threads=1), SPECS["dynamic"]) as store:
        first, second = (commit_of(version, [1, 2], 0, ["dynamic"]) for version in (1, 2))
        store.commit(first)

        def broken(self: MemoryTable, version: int, *how: object) -> None:
            raise ArithmeticError("this cannot be")

        with monkeypatch.context() as patched:
            patched.setattr(MemoryTable, "evict", broken)
            with pytest.raises(ArithmeticError):
                store.commit(second)
        for ask in (lambda: store.commit(second), lambda: store.lookup({"dynamic": int64(1)})):
            with pytest.raises(StoreBroken, match="middle of a commit; restore a checkpoint: this cannot be"):
                ask()


@pytest.mark.slow
def test_kernels_look_at_nothing_beyond_their_arrays() -> None:
    """A part of the tests, with kernels that are compiled to check every index, and kept for the next run."""
    engine = Path(__file__).parent
    compiled = engine.parents[2] / "build" / "checked-kernels"
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(compiled), "PYTEST_ADDOPTS": ""}
    names = "test_hostile_commits", "test_admission_eviction", "tiered/test_framed_reads", "../native/test_id_index"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += [*(str(engine / f"{name}.py") for name in names), "-k", "not beyond_their_arrays and not whole_or_not"]
    run = subprocess.run(command, env=environment, cwd=engine.parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4_000:] + run.stderr[-2_000:]
