"""A job as a simulation: workers, store servers, master, their network cards and their Redis.

All store servers hold the same share of all rows, so one of them is simulated and stands for all: what a worker asks
of one at a time it asks of the others at the same time. What is sent through a card takes its bytes' time at the sender
and at the receiver. The seconds in which nobody computes (`Calibration.wait`) are spread over the five calls of a
version: tasks and dense part, lookup, push of rows, report, commit.
"""

import math
from collections.abc import Sequence

import numpy as np
import simpy

from benchmarks.simulation.calibration import Calibration
from benchmarks.simulation.cluster import Cluster, Outcome
from benchmarks.simulation.stations import Cores, Station, Steps

_CALLS = 5
_ID_BYTES, _VALUE_BYTES = 8, 4


def simulated(cluster: Cluster, costs: Calibration, versions: int = 12, warm: int = 2) -> Outcome:
    """Runs a job for some versions.

    Args:
        cluster: The job.
        costs: Measured.
        versions: That are counted; of asynchronous jobs, micro-batches of every worker.
        warm: That come before.
    """
    job = _Job(cluster, costs)
    run = job.run_sync if cluster.staleness is None else job.run_async
    return run(warm, versions)


class _Job:
    def __init__(self, cluster: Cluster, costs: Calibration) -> None:
        self._of, self._costs = cluster, costs
        self._env = env = simpy.Environment()
        crowded = costs.crowded(cluster.workers + cluster.stores + 1, cluster.cores)
        cores = Cores(env, cluster.cores, cluster.others, cluster.seed, crowded)
        self._workers = [Station(env, cores, costs.beside) for _ in range(cluster.workers)]
        self._store, self._master = Station(env, cores, costs.beside), Station(env, cores, costs.beside)
        # The other store servers need cores, too, where all processes share them.
        self._others = 0 if cluster.cores is None else cluster.stores - 1
        self._cores = cores
        self._cards = {name: Station(env) for name in ("store in", "store out", "master in", "master out")}
        self._redis, self._written = Station(env, cores), env.event().succeed()
        self._random = np.random.default_rng(cluster.seed)
        self._wait = costs.wait / _CALLS
        self._at_workers = 0.0  # seconds of a worker's card, on average
        self._paused = [0.0] * cluster.workers

    # What each of them does in a version.

    def _fetch(self, number: int) -> Steps:
        """The dense part and the rows, at the same time."""
        yield self._env.all_of([self._env.process(self._pull(number)), self._env.process(self._look_up(number))])

    def _pull(self, number: int) -> Steps:
        of, costs = self._of, self._costs
        yield self._env.timeout(self._wait)
        yield from self._master.work(costs.master_push / 2 + costs.master_dense * self._of.dense / 2)
        yield from self._sent("master out", _VALUE_BYTES * self._of.dense)
        yield from self._workers[number].work(costs.worker_version / 2 + costs.worker_dense * of.dense / 2)

    def _look_up(self, number: int) -> Steps:
        yield self._env.timeout(self._wait)
        yield from self._to_stores(number, self._costs.lookup_share, "store out")

    def _push_rows(self, number: int) -> Steps:
        yield self._env.timeout(self._wait)
        yield from self._to_stores(number, self._costs.push_share, "store in")

    def _to_stores(self, number: int, share: float, rows_go: str) -> Steps:
        """A lookup or a push: half of what the rows cost the worker, and their share of what they cost a server."""
        of, costs = self._of, self._costs
        rows = of.ids * (costs.worker_row + costs.worker_value * of.dim)
        yield from self._workers[number].work((rows + costs.worker_server * of.stores) / 2)
        values = _VALUE_BYTES * of.ids * of.dim
        # The card of the worker carries all rows, that of each server its own.
        yield from self._sent(rows_go, values / of.stores, values - values / of.stores)
        yield from self._sent("store in", _ID_BYTES * of.ids / of.stores)
        yield from self._at_stores(costs.store_push / 2 + share * self._row_work(of.ids))

    def _report(self, number: int) -> Steps:
        of, costs = self._of, self._costs
        yield self._env.timeout(self._wait)
        yield from self._workers[number].work(costs.worker_version / 2 + costs.worker_dense * of.dense / 2)
        yield from self._sent("master in", _VALUE_BYTES * self._of.dense)
        yield from self._master.work(costs.master_push / 2 + costs.master_dense * self._of.dense / 2)

    def _commit(self, pushes: int) -> Steps:
        of, costs = self._of, self._costs
        yield self._env.timeout(self._wait)
        yield from self._master.work(costs.master_version + costs.master_server * of.stores)
        yield self._written  # Redis may be one version behind
        commit = 1 - costs.lookup_share - costs.push_share
        yield from self._at_stores(costs.store_version + commit * pushes * self._row_work(of.ids))
        yield from self._master.work(costs.master_update * of.dense)
        if of.redis:
            different = of.rows * -math.expm1(-pushes * of.ids / of.rows) / of.stores
            self._written = self._env.process(self._write(different))

    def _write(self, rows: float) -> Steps:
        """Every store server writes so many rows to its Redis."""
        of, costs = self._of, self._costs
        yield from self._at_stores(rows * (costs.store_redis_row + costs.store_redis_value * of.dim))
        yield from self._redis.work(rows * (costs.redis_row + costs.redis_value * of.dim))

    def _row_work(self, ids: float) -> float:
        """A server's seconds for its share of the rows of a micro-batch."""
        return ids / self._of.stores * (self._costs.store_row + self._costs.store_value * self._of.dim)

    def _at_stores(self, seconds: float) -> Steps:
        """Work of every store server at the same time; ends when all have done it."""
        if not self._others:
            yield from self._store.work(seconds)
            return
        others = [self._env.process(self._cores.work(seconds)) for _ in range(self._others)]
        yield self._env.all_of([self._env.process(self._store.work(seconds)), *others])

    def _compute(self, number: int) -> Steps:
        of = self._of
        took = of.step_s
        if of.spread:  # of the logarithm, so that no step takes less than nothing
            deviation = math.sqrt(math.log1p(of.spread**2))
            took *= float(self._random.lognormal(-(deviation**2) / 2, deviation))
        self._paused[number] += took
        yield self._env.timeout(took)

    def _sent(self, card: str, size: float, besides: float = 0.0) -> Steps:
        """Bytes through a card; `besides` are those that pass the worker's card alone, after these."""
        if self._of.gbit is not None:
            a_byte = 8e-9 / self._of.gbit
            yield from self._cards[card].work(size * a_byte)
            self._at_workers += (size + besides) * a_byte / self._of.workers
            yield self._env.timeout((size + besides) * a_byte)

    # Jobs.

    def run_sync(self, warm: int, versions: int) -> Outcome:
        """Every version takes one micro-batch of each worker."""
        env, of = self._env, self._of
        stamps: list[float] = []
        busy: dict[str, float] = {}

        def worker(number: int) -> Steps:
            yield from self._fetch(number)
            yield from self._compute(number)
            yield from self._push_rows(number)
            yield from self._report(number)

        def job() -> Steps:
            for version in range(warm + versions):
                yield env.all_of([env.process(worker(number)) for number in range(of.workers)])
                yield from self._commit(of.workers)
                stamps.append(env.now)
                if version == warm - 1:
                    busy.update(self._busy())

        env.run(env.process(job()))
        took = stamps[-1] - stamps[warm - 1]
        gaps = np.diff(stamps[warm - 1 :])
        return self._outcome(took, versions, gaps.tolist(), versions * of.workers, busy, 0)

    def run_async(self, warm: int, micro_batches: int) -> Outcome:
        """Every micro-batch is a version; the master makes one after the other, and refuses what is too stale."""
        env, of = self._env, self._of
        assert of.staleness is not None
        bound, made, refused = of.staleness, 0, 0
        latencies: list[float] = []
        busy: dict[str, float] = {}
        began = 0.0
        turn = simpy.Resource(env, 1)

        def worker(number: int) -> Steps:
            nonlocal made, refused, began
            while True:
                since, computed_on = env.now, made
                yield from self._fetch(number)
                yield from self._compute(number)
                yield from self._push_rows(number)
                yield from self._report(number)
                with turn.request() as mine:
                    yield mine
                    if made - computed_on > bound:
                        refused += made >= warm * of.workers
                        continue
                    yield from self._commit(1)
                    made += 1
                if made == warm * of.workers:
                    began = env.now
                    busy.update(self._busy())
                elif made > warm * of.workers:
                    latencies.append(env.now - since)

        done = env.event()

        def watch() -> Steps:
            while made < (warm + micro_batches) * of.workers:
                yield env.timeout(self._costs.wait + of.step_s)
            done.succeed()

        for number in range(of.workers):
            env.process(worker(number))
        env.process(watch())
        env.run(done)
        counted = made - warm * of.workers
        return self._outcome(env.now - began, counted, latencies, counted, busy, refused)

    def _busy(self) -> dict[str, float]:
        computing = np.mean([station.busy_s for station in self._workers]) + np.mean(self._paused)
        every = {"workers": float(computing), "store servers": self._store.busy_s, "master": self._master.busy_s}
        cards = {
            "network of workers": self._at_workers,
            "network of store servers": max(self._cards["store in"].busy_s, self._cards["store out"].busy_s),
            "network of the master": max(self._cards["master in"].busy_s, self._cards["master out"].busy_s),
        }
        return {**every, **cards, "Redis": self._redis.busy_s}

    def _outcome(
        self, took: float, versions: int, latencies: Sequence[float], counted: int, busy: dict[str, float], refused: int
    ) -> Outcome:
        used = {name: (spent - busy[name]) / took for name, spent in self._busy().items()}
        return Outcome(took, versions, tuple(latencies), counted * self._of.examples / took, used, refused)
