"""One master holds 1,000 workers that have joined, in a few processes: on few threads, in little memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from benchmarks.sessions import serving, stub_workers
from elastable.master.wire.client import MasterClient

WORKERS = 1_000
DEADLINE_S = 300


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(10 * DEADLINE_S):
        if condition():
            return
        pause.wait(0.1)
    raise AssertionError("it did not come about in time")


def test_a_thousand_workers_join_wait_push_and_leave() -> None:
    # A version takes a push of every one of them.
    with serving(grads_to_wait=WORKERS) as served, MasterClient(served.address, DEADLINE_S) as client:
        before = served.mark()
        with stub_workers(served.address, WORKERS) as processes:
            assert len(client.status().workers) == WORKERS
            until(lambda: client.status().version >= 2)
            after = served.mark()
            assert after["threads"] - before["threads"] < WORKERS / 3
            assert after["rss"] - before["rss"] < WORKERS << 20
            assert sum(worker.micro_batches for worker in client.status().workers) >= 2 * WORKERS
            processes[0].kill()  # what its workers held goes to the others
            until(lambda: len(client.status().workers) == WORKERS * 3 // 4)
            version = client.status().version
            until(lambda: client.status().version > version)
        until(lambda: not client.status().workers)
