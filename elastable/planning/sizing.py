"""How many workers and store servers a synchronous job needs, and what each of them: sums of calibrated costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elastable.embedding_store.errors import BadInput
from elastable.master.commits.dense_at_servers import worth_servers
from elastable.planning.calibration import Calibration

__all__ = ["BUSY", "MOST_STORES", "MOST_WORKERS", "JobShape", "Pace", "Sizing", "fastest", "pace", "sized"]

MOST_WORKERS, MOST_STORES = 1_000, 64
BUSY = 0.7
"""The part of a version in which a store server may be busy: beyond it, nothing is left for what is not planned."""

_VALUE_BYTES, _ID_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class JobShape:
    """What a sizing must know of a job.

    Attributes:
        examples: Of a micro-batch, of which every worker computes one a version.
        rows: Different rows of a micro-batch.
        values: Values of these rows together.
        dense: Values of all trainable dense variables.
        step_s: Seconds in which a worker computes a micro-batch, once it has rows.
        table_bytes: Of all rows with their slots.
        gradient_copies: How often the gradients of a version lie in a store server's memory: as pushed, and summed.
    """

    examples: int
    rows: float
    values: float
    dense: int
    step_s: float
    table_bytes: int
    gradient_copies: int = 2


@dataclass(frozen=True, slots=True)
class Pace:
    """A version of a job on some workers and store servers.

    Attributes:
        workers, stores: How many there are.
        version_s: Seconds of a version.
        worker_s, store_s, master_s: Seconds of it in which each of them is busy.
    """

    workers: int
    stores: int
    version_s: float
    worker_s: float
    store_s: float
    master_s: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a job needs.

    Attributes:
        pace: Of its versions.
        examples_per_s: That it computes then.
        store_bytes: Memory of a store server: its share of all rows, and the gradients of a version.
        worker_bits, store_bits, master_bits: A second, through the network card of each, in the busier direction.
        limit: Where most of a version's time goes: "workers", "store servers", "master" or "round trips".
    """

    pace: Pace
    examples_per_s: float
    store_bytes: int
    worker_bits: float
    store_bits: float
    master_bits: float
    limit: str


def pace(job: JobShape, costs: Calibration, workers: int, stores: int) -> Pace:
    """A version, if every process has a core to itself and the network is not the limit.

    A store server and the master take the calls of all workers one after the other; a worker's own work waits for
    neither, as workers that are not served yet compute or send.
    """
    row_work = (job.rows * costs.store_row + job.values * costs.store_value) / stores
    commit = costs.store_version + (1 - costs.lookup_share - costs.push_share) * workers * row_work
    push = costs.store_push + (costs.lookup_share + costs.push_share) * row_work
    calls = 1.0
    decision = costs.master_version + costs.master_server * stores + costs.master_update * job.dense
    if _at_servers(job, workers):
        # A worker makes a third call to every server, and the master two more.
        report, slices = costs.master_push, costs.store_dense * job.dense / stores
        push, commit = push + slices + costs.store_push / 2, commit + slices + 2 * costs.store_version
        decision += 2 * costs.master_server * stores + costs.master_dense * job.dense
        calls += 0.5
    else:
        report = costs.master_push + costs.master_dense * job.dense
    own = (
        costs.worker_version
        + costs.worker_server * stores * calls
        + costs.worker_dense * job.dense
        + job.rows * costs.worker_row
        + job.values * costs.worker_value
    )
    # The last of all pushes is waited for without what its server does beside; those before it with all of that.
    queued = max((workers - costs.beside) * push, (workers - costs.beside) * report)
    version_s = job.step_s + (1 - costs.beside) * (own + decision + commit) + queued + costs.wait
    return Pace(workers, stores, version_s, job.step_s + own, workers * push + commit, workers * report + decision)


def sized(job: JobShape, costs: Calibration, examples_per_s: float, memory: int) -> Sizing:
    """The fewest processes that compute so many examples/s, none of which needs more than `memory` bytes for rows.

    Raises:
        BadInput: no number of workers and store servers does; names the fastest job, and what limits it.
    """

    def enough(each: Pace) -> bool:
        return job.examples * each.workers >= examples_per_s * each.version_s

    found = list(_jobs(job, costs, memory, enough))
    if not found:
        best = fastest(job, costs, memory)
        raise BadInput(
            f"{examples_per_s:,.0f} examples/s are out of reach of synchronous versions with micro-batches of "
            f"{job.examples:,}: the most are {best.examples_per_s:,.0f}, with {best.pace.workers} workers and "
            f"{best.pace.stores} store servers, limited by {best.limit}. Larger micro-batches (--micro-batch-size) "
            "need fewer versions"
        )
    return _sizing(job, costs, min(found, key=lambda each: (each.workers + each.stores, each.stores)))


def fastest(job: JobShape, costs: Calibration, memory: int) -> Sizing:
    """The most examples/s of all numbers of workers and store servers; of equal ones, the fewest processes.

    Raises:
        BadInput: the rows do not fit.
    """
    every = list(_jobs(job, costs, memory, lambda each: True, first=False))
    return _sizing(
        job, costs, max(every, key=lambda each: (round(job.examples * each.workers / each.version_s), -each.stores))
    )


def _jobs(
    job: JobShape, costs: Calibration, memory: int, enough: Callable[[Pace], bool], first: bool = True
) -> Iterator[Pace]:
    """The jobs that are enough and keep no store server too busy; of every number of servers the first, or all."""
    least = _least_stores(job, memory)
    for stores in range(least, MOST_STORES + 1):
        for workers in _counts():
            each = pace(job, costs, workers, stores)
            if _store_bytes(job, each) > memory:
                break
            if each.store_s <= BUSY * each.version_s and enough(each):
                yield each
                if first:
                    break


def _least_stores(job: JobShape, memory: int) -> int:
    least = max(1, math.ceil(job.table_bytes / memory))
    if least > MOST_STORES:
        raise BadInput(
            f"{job.table_bytes / 2**30:,.1f} GiB of rows need {least} store servers of {memory / 2**30:,.1f} GiB each, "
            f"and at most {MOST_STORES} are planned: give each more memory (--server-memory), or a tier on files or "
            "in Redis for rows that are not needed all the time"
        )
    return least


def _counts() -> Iterator[int]:
    """1 to 64, then in steps of a 32nd."""
    count = 1
    while count <= MOST_WORKERS:
        yield count
        count += max(1, count // 32)


def _store_bytes(job: JobShape, each: Pace) -> int:
    gradients = job.gradient_copies * each.workers * (_VALUE_BYTES * job.values + _ID_BYTES * job.rows)
    if _at_servers(job, each.workers):
        gradients += _VALUE_BYTES * job.dense * (each.workers + 1)
    return math.ceil((job.table_bytes + gradients) / each.stores)


def _at_servers(job: JobShape, workers: int) -> bool:
    """Whether store servers sum dense gradients; every worker computes a micro-batch of a version."""
    return worth_servers(_VALUE_BYTES * job.dense, workers)


def _sizing(job: JobShape, costs: Calibration, each: Pace) -> Sizing:
    bytes_of_rows = _VALUE_BYTES * job.values + _ID_BYTES * job.rows
    dense = _VALUE_BYTES * job.dense
    at_servers = _at_servers(job, each.workers)
    bits = 8 / each.version_s
    busy = {"workers": each.worker_s, "store servers": each.store_s, "master": each.master_s}
    busy["round trips"] = costs.wait
    return Sizing(
        each,
        job.examples * each.workers / each.version_s,
        _store_bytes(job, each),
        bits * (bytes_of_rows + dense),
        bits * (bytes_of_rows + dense * at_servers) * each.workers / each.stores,
        bits * dense * (1 if at_servers else each.workers),
        max(busy, key=lambda name: busy[name]),
    )
