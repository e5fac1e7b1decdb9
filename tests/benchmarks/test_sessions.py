"""One master holds many workers that have joined, in a few processes: on few threads, in little memory."""

import pytest

from benchmarks.calls.sessions import serving, stub_workers
from elastable.master.rpc.client import MasterClient
from tests.waiting import until

DEADLINE_S = 300


@pytest.mark.parametrize("workers", [100, *(pytest.param(count, marks=pytest.mark.slow) for count in (300, 1_000))])
def test_workers_join_wait_push_and_leave(workers: int) -> None:
    # A version takes a push of every one of them.
    with serving(grads_to_wait=workers) as served, MasterClient(served.address, DEADLINE_S) as client:
        before = served.mark()
        with stub_workers(served.address, workers) as processes:
            assert len(client.status().workers) == workers
            until(lambda: client.status().version >= 2, DEADLINE_S)
            after = served.mark()
            # gRPC may have up to 128 to answer calls, however many workers wait.
            assert after["threads"] - before["threads"] < max(250, workers / 3)
            assert after["rss"] - before["rss"] < workers << 20
            assert sum(each.micro_batches for each in client.status().workers) >= 2 * workers
            processes[0].kill()  # what its workers held goes to the others
            until(lambda: len(client.status().workers) == workers * 3 // 4, DEADLINE_S)
            version = client.status().version
            until(lambda: client.status().version > version, DEADLINE_S)
        until(lambda: not client.status().workers, DEADLINE_S)
