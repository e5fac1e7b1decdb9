"""Starts the processes of a job, and measures it for a while."""

import multiprocessing
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import busy_s, moved_bytes, processor_s, redis_server
from benchmarks.scale.processes import TABLE, drawn_ids, run_master, run_worker, table_spec
from benchmarks.scale.setting import Run, Setting
from benchmarks.storage.redis_log import COMPOSE_REDIS
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.shards.ownership import session_of
from elastable.embedding_store.shards.server_contract import PushedCommit, RowPush, RowSums, Slices, SumTerm
from elastable.embedding_store.support.store_url import SERVERS
from elastable.jobs.engines.engine import LocalEngine
from elastable.jobs.engines.roles import start_stores
from elastable.jobs.options import StoreServerOptions

_WARM_VERSIONS = 5
_START_S = 240.0
_PROBED = 200  # versions; processor time is counted in hundredths of a second
_PROBED_WORKERS = 4

# One process imports what all of them need; those of a job are forked from it.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["benchmarks.scale.processes"])


def measured(setting: Setting, seconds: float) -> Run:
    """What a job does once it is warm."""
    with ExitStack() as held:
        home = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="scale-")))
        url, pids, of_redis = held.enter_context(_stores(setting, home))
        connection, pipe = _processes.Pipe()
        master = held.enter_context(_process(run_master, setting, url, pipe))
        address = _answer(connection)
        workers = [held.enter_context(_process(run_worker, setting, address, n)) for n in range(setting.workers)]
        give_up = time.monotonic() + _START_S
        while len(_stamps(connection)) < _WARM_VERSIONS:
            if time.monotonic() > give_up:
                raise RuntimeError(f"{setting}: not warm after {_START_S:g} s")
            time.sleep(0.1)
        kinds = {"worker_s": workers, "store_s": pids, "master_s": [master], "redis_s": of_redis}
        busy, used = busy_s(), {kind: processor_s(each) for kind, each in kinds.items()}
        own, began, moved = time.process_time(), time.monotonic(), moved_bytes(master)
        time.sleep(seconds)
        ended, times = time.monotonic(), [at for at in _stamps(connection) if at > began]
        moved = moved_bytes(master) - moved
        used = {kind: processor_s(each) - used[kind] for kind, each in kinds.items()}
        others = busy_s() - busy - sum(used.values()) - (time.process_time() - own)
        gaps = np.diff(times)
    unique = float(np.mean([len(np.unique(ids)) for n in range(setting.workers) for ids in drawn_ids(setting, n)]))
    return Run(
        setting,
        ended - began,
        len(times),
        unique,
        p50_s=float(np.quantile(gaps, 0.5)),
        p99_s=float(np.quantile(gaps, 0.99)),
        worker_s=used["worker_s"],
        store_s=used["store_s"],
        master_s=used["master_s"],
        redis_s=used["redis_s"],
        other_cores=max(0.0, others / (ended - began)),
        cores=len(os.sched_getaffinity(0)),
        master_bytes=moved,
    )


def shares(setting: Setting) -> tuple[float, float]:
    """Which part of a store server's processor time for rows goes to lookups, and which to pushes."""
    with ExitStack() as held:
        home = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="scale-")))
        url, pids, _ = held.enter_context(_stores(setting, home))
        store = held.enter_context(open_store(url))
        assert isinstance(store, StoreServers)
        store.create_table(table_spec(setting))
        key = secrets.token_bytes(32)
        store.begin_job("scale", False, key)
        store.show_session(session_of(key, "probe"))
        pushes = [
            Slices(ids, np.full((len(ids), setting.dim), 0.01, np.float32))
            for n in range(_PROBED_WORKERS)
            for ids in [np.unique(drawn_ids(setting, n)[0])]
        ]
        spent = np.zeros(3)
        for _ in range(_PROBED):
            version = store.version()
            marks = [processor_s(pids)]
            for each in pushes:
                store.lookup({TABLE: each.indices})
            marks.append(processor_s(pids))
            for number, each in enumerate(pushes):
                store.push_rows(RowPush("scale", version, number, ({TABLE: each},)))
            marks.append(processor_s(pids))
            terms = tuple(SumTerm(number, 0, 1 / len(pushes)) for number in range(len(pushes)))
            store.commit_pushed(PushedCommit(RowSums(version, terms), version, {TABLE: 0.01}))
            marks.append(processor_s(pids))
            spent += np.diff(marks)
    lookup, push, _ = spent / spent.sum()
    return float(lookup), float(push)


@contextmanager
def _stores(setting: Setting, home: Path) -> Iterator[tuple[str, list[int], list[int]]]:
    """URL and processes of store servers, and the processes of their Redis."""
    with ExitStack() as held:
        url, of_redis = "memory", []
        if setting.redis:
            server = held.enter_context(redis_server(*COMPOSE_REDIS))
            assert server.process is not None
            url, of_redis = f"{server.url}?deadline=120", [server.process.pid]
        options = StoreServerOptions(store=url, transport="grpc", listen="127.0.0.1:0")
        stores = held.enter_context(start_stores(LocalEngine(home), setting.stores, options, {}))
        yield SERVERS + ",".join(stores.addresses()), [it.pid for it in stores.look()], of_redis


@contextmanager
def _process(target: object, *arguments: object) -> Iterator[int]:
    """Runs a function in a separate process; its id."""
    process = _processes.Process(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
    process.start()
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def _stamps(connection: Connection) -> Sequence[float]:
    connection.send(True)
    times: Sequence[float] = _answer(connection)
    return times


def _answer(connection: Connection) -> Any:
    if not connection.poll(_START_S):
        raise RuntimeError(f"no answer from a master within {_START_S:g} s")
    return connection.recv()
