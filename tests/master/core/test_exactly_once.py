"""Every record is trained exactly once per epoch, whatever happens to workers, messages, connections and the master.

A record's gradient is -1 in the record's own row, the learning rate is 1, and
gradients are summed: so a row says how often its record was trained.
"""

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import pytest

from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import ElastableError, FutureVersion, NotJoined, StaleVersion
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master import api
from elastable.master.commits.accumulate import Accumulated
from elastable.master.commits.dense_part import DensePart
from elastable.master.commits.version_record import VersionRecord
from elastable.master.core.hooks import Hooks
from elastable.master.core.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.record_order import record_order
from elastable.worker.runtime.loop import push_rows
from tests.embedding_store.shards.served_shards import ServedShard, served, stopped_with
from tests.tcp_proxy import TcpProxy, tcp_proxy

RECORDS, EPOCHS = 90, 2
SEEN = TableSpec("seen", 1, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd", learning_rate=1.0))
SYNC = api.JobSpec(
    job="j", micro_batch_size=4, train_records=RECORDS, validation_records=6, grads_to_wait=3, epochs=EPOCHS,
    average="sum",
)  # fmt: skip
ASYNC = replace(SYNC, mode="async", grads_to_wait=1)
BOUNDED = replace(ASYNC, staleness_bound=1)
#: One secret of all clients here: late copies of pushes come over connections that their workers did not make.
SESSION = bytes(range(16))
OPTIONS = MasterOptions(lease_seconds=0.3, backup_after_s=0.1)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds of such a job."""

    progress: str
    rows: RowBlock


class Life(Hooks):
    """One start of the master, which may be killed at a version."""

    def __init__(
        self, job: api.JobSpec, proxy: TcpProxy, store: EmbeddingStore, start: Progress, dies_at: int | None
    ) -> None:
        self.store = store
        self.master = Master(job, store, DensePart(), start=start, options=OPTIONS)
        self.server = GrpcServer("127.0.0.1:0", [store_service(store), master_service(self.master)])
        self._dies_at, self._proxy = dies_at, proxy
        proxy.server_port = int(self.server.address.rpartition(":")[2])

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if version == self._dies_at:
            self._proxy.cut()
            self.server.stop(0)
            self.master.stop("killed")

    def counts(self) -> np.ndarray:
        return self.store.lookup({"seen": np.arange(RECORDS)})["seen"][:, 0]


class SavingLife(Life):
    """Saves now and then, and begins with what was saved."""

    def __init__(self, job: api.JobSpec, proxy: TcpProxy, saved: Saved | None, dies_at: int | None) -> None:
        store, start = MemoryStore(), Progress() if saved is None else Progress.from_json(saved.progress)
        store.create_table(SEEN)
        if saved is not None:
            store.put("seen", [saved.rows])
            store.reset_version(start.version)
        super().__init__(job, proxy, store, start, dies_at)
        self.saved = saved

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if version % 5 == 0:
            self.saved = Saved(self.master.progress().to_json(), self.store.read_rows("seen", np.arange(RECORDS)))
        super().on_version(version, logs)


class Post(threading.Thread):
    """Delivers copies of pushes late and in any order, to whichever master is there then; at the end all once more."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.messages: SimpleQueue[tuple[float, api.Push] | None] = SimpleQueue()
        self.delivered: list[api.PushOutcome] = []
        self._address = address

    def run(self) -> None:
        bag: list[tuple[float, api.Push]] = []
        seen: list[api.Push] = []
        with MasterClient(self._address, deadline_s=120.0, session=SESSION) as client:
            while True:
                try:
                    message = self.messages.get(timeout=0.02)
                    if message is None:
                        break
                    bag.append(message)
                    seen.append(message[1])
                except Empty:
                    pass
                for due, push in [message for message in bag if message[0] <= time.monotonic()]:
                    bag.remove((due, push))
                    self.deliver(client, push)
            for push in seen:
                self.deliver(client, push)

    def deliver(self, client: MasterClient, push: api.Push) -> None:
        # Of a version that is not there, or to nobody: lost.
        with suppress(ElastableError):
            self.delivered.append(client.report_gradient(push).outcome)


class Clumsy(threading.Thread):
    """A worker to whom everything happens: it dies and comes back, hangs, says things twice, loses connections."""

    def __init__(self, job: api.JobSpec, address: str, post: Post, seed: int) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.job, self.post = job, post
        self.client = MasterClient(address, deadline_s=60.0, session=SESSION)
        self.failure: BaseException | None = None
        self.accidents: dict[str, int] = {}
        self.tasks: set[api.Task] = set()
        self.identity = api.WorkerIdentity("")
        self.sequence = 0
        self.reported = 0

    def run(self) -> None:
        session = self.born()
        try:
            finished = False
            while not finished:
                try:
                    finished = self.live()
                except NotJoined:
                    session.close()
                    session = self.joined()
                except FutureVersion:
                    self.tasks.clear()
                except _Dead:
                    leaves, session = session, self.born()
                    leaves.close()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.failure = error
        finally:
            session.close()
            self.client.close()

    def born(self) -> api.Session:
        self.identity, self.sequence, self.tasks = api.WorkerIdentity(uuid.uuid4().hex), 0, set()
        return self.joined()

    def joined(self) -> api.Session:
        return self.client.join(self.identity)

    def happens(self, what: str, chance: float) -> bool:
        if self.random.random() >= chance:
            return False
        self.accidents[what] = self.accidents.get(what, 0) + 1
        return True

    def live(self) -> bool:
        lease = self.client.lease_tasks(self.identity.incarnation, max(0, 3 - len(self.tasks)), 0.02, self.tasks)
        if self.happens("answer lost", 0.1):
            return False
        self.tasks -= set(lease.revoked)
        self.tasks.update(lease.tasks)
        if self.tasks:
            self.work(min(self.tasks))
        return lease.finished

    def work(self, task: api.Task) -> None:
        wanted = task.version if self.job.mode == "sync" else None
        try:
            snapshot = self.client.pull_dense(self.identity.incarnation, wanted, 0.02)
        except StaleVersion:
            self.tasks.discard(task)
            return
        if snapshot is None:
            return
        if self.happens("hangs for longer than the lease", 0.03):
            time.sleep(0.5)
        if self.happens("dies between computing and reporting", 0.03):
            raise _Dead
        if task.kind is api.TaskKind.EVALUATE:
            report = api.EvaluationReport(self.identity.incarnation, task.version, task.micro_batch, 4, ())
            self.client.report_evaluation(report)
        else:
            push = self.push_of(task, snapshot.version)
            for _ in range(2 if self.happens("says it twice", 0.1) else 1):
                self.client.report_gradient(push)
            if self.happens("a copy comes late", 0.2):
                self.post.messages.put((time.monotonic() + self.random.random() / 2, push))
        self.reported += 1
        if self.happens("dies after reporting, before it is done with it", 0.03):
            raise _Dead
        self.tasks.discard(task)

    def push_of(self, task: api.Task, version: int) -> api.Push:
        self.sequence += 1
        sync = self.job.mode == "sync"
        name: api.PushId = api.SyncPushId(task.version, task.micro_batch)
        if not sync:
            name = api.AsyncPushId(self.identity.incarnation, self.sequence, task.micro_batch)
        order = record_order(RECORDS, task.epoch, self.job.seed, self.job.shuffle, None)
        records = order.take(task.start, task.stop)
        slices = {"seen": Slices(records, -np.ones((len(records), 1), np.float32))}
        on = None if sync else version
        return api.Push(
            name, len(records), slices=slices, job="j", computed_on=on, incarnation=self.identity.incarnation
        )


class _Dead(Exception):
    """A worker is killed here."""


def _disturb(proxy: TcpProxy, over: threading.Event, chance: random.Random, workers: Sequence[Clumsy]) -> None:
    """Cuts connections, and loses answers before clients see theirs end.

    Each time a worker must have reported something since: a slow machine, too, gets on between two disturbances.
    """
    seen = 0
    while not over.wait(chance.uniform(0.05, 0.4)):
        reported = sum(worker.reported for worker in workers)
        if reported == seen:
            continue
        seen = reported
        if chance.random() < 0.5:
            proxy.cut()
        else:
            proxy.lose_answers()
            if not over.wait(0.05):
                proxy.hang_up_on_clients()


@contextmanager
def disturbed(workers: Sequence[Clumsy], post: Post, proxy: TcpProxy) -> Iterator[None]:
    """Workers, a late post and a bad network, until the job in the block has ended."""
    over = threading.Event()
    network = threading.Thread(target=_disturb, args=(proxy, over, random.Random(7), workers), daemon=True)
    for thread in (post, network, *workers):
        thread.start()
    yield
    over.set()
    for worker in workers:
        worker.join(timeout=60)
    post.messages.put(None)
    for thread in (post, network):
        thread.join(timeout=60)
    assert [worker.failure for worker in workers] == [None] * len(workers)


@pytest.mark.parametrize("job", [SYNC, ASYNC, BOUNDED], ids=["sync", "async", "bounded"])
def test_every_record_is_trained_once_per_epoch(job: api.JobSpec) -> None:
    """Three clumsy workers, a disturbed network, a late post, and a master that is killed twice."""
    deaths = (17, 33) if job.mode == "async" else (6, 13)  # of 46 versions, and of 16
    with tcp_proxy(1) as proxy:
        address = f"127.0.0.1:{proxy.port}"
        life = SavingLife(job, proxy, None, deaths[0])
        post = Post(address)
        workers = [Clumsy(job, address, post, seed) for seed in range(3)]
        with disturbed(workers, post, proxy):
            for dies_at in (deaths[1], None):
                life.master.run(life)
                assert life.saved is not None
                life = SavingLife(job, proxy, life.saved, dies_at)
            life.master.run(life)
        life.server.stop(0)
    np.testing.assert_array_equal(life.counts(), np.full(RECORDS, EPOCHS))
    assert life.master.status().records_trained == EPOCHS * RECORDS
    # Much of it did happen; who draws which accident depends on how the workers share the micro-batches.
    assert len({kind for worker in workers for kind in worker.accidents}) >= 2
    assert post.delivered


# -- rows at store servers, whoever dies


def _clients(servers: Sequence[ServedShard]) -> StoreServers:
    return StoreServers([ShardClient(server.address, 60.0) for server in servers])


class ServersLife(Life):
    """Goes on from what the store servers have; `kills`: at a version, the number of the one that is killed."""

    def __init__(
        self,
        job: api.JobSpec,
        proxy: TcpProxy,
        servers: list[ServedShard],
        dies_at: int | None,
        kills: Mapping[int, int],
    ) -> None:
        store = _clients(servers)
        store.create_table(SEEN)
        store.recover()
        record = store.record()
        start = Progress() if record is None else VersionRecord.from_bytes(record).progress
        super().__init__(job, proxy, store, start, dies_at)
        self.ages: list[int] = []
        self._note_ages()
        self._servers, self._kills, self._of_servers = servers, kills, store

    def _note_ages(self) -> None:
        committer = self.master._driver._committer
        commit = committer.commit

        def noted(version: int, pushes: Sequence[api.Push], progress: Callable[[Accumulated], Progress]) -> Accumulated:
            made = commit(version, pushes, progress)
            self.ages += [version - 1 - push.computed_on for push in pushes if push.computed_on is not None]
            return made

        committer.commit = noted  # type: ignore[method-assign]

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if version in self._kills:
            stopped_with(self._servers, self._kills[version])
            self._of_servers.require_owner()  # as `elastable master` says every second
        super().on_version(version, logs)

    def close(self) -> None:
        self.server.stop(0)
        self._of_servers.close()


class Worker(Clumsy):
    """Hands the rows' part of its pushes to the store servers; what is left may be said twice, late or never."""

    def __init__(self, job: api.JobSpec, address: str, post: Post, seed: int, servers: StoreServers) -> None:
        super().__init__(job, address, post, seed)
        self.servers = servers

    def joined(self) -> api.Session:
        session = super().joined()
        self.servers.show_session(session.store_session)
        return session

    def work(self, task: api.Task) -> None:
        try:
            super().work(task)
        except StaleVersion:
            self.tasks.discard(task)

    def push_of(self, task: api.Task, version: int) -> api.Push:
        return push_rows(super().push_of(task, version), self.servers, self.job, 60.0, lambda: None)


@pytest.mark.parametrize(
    "job",
    [pytest.param(SYNC, marks=pytest.mark.slow), pytest.param(ASYNC, marks=pytest.mark.slow), BOUNDED],
    ids=["sync", "async", "bounded"],
)
def test_every_record_is_trained_once_per_epoch_at_servers(tmp_path: Path, job: api.JobSpec) -> None:
    """Clumsy workers, a disturbed network, two store servers that are killed in turn, and a master that is killed."""
    deaths, kills = ((20, None), {9: 0, 31: 1}) if job.mode == "async" else ((8, None), {4: 0, 11: 1})
    ages: list[int] = []
    with tcp_proxy(1) as proxy, served(2, tmp_path) as (servers, _), ExitStack() as held:
        address = f"127.0.0.1:{proxy.port}"
        post = Post(address)
        workers = [Worker(job, address, post, seed, held.enter_context(_clients(servers))) for seed in range(3)]
        life = ServersLife(job, proxy, servers, deaths[0], kills)
        with disturbed(workers, post, proxy):
            for dies_at in deaths:
                life.master.run(life)
                ages += life.ages
                if life.master.stop_reason is None:
                    break
                life.close()
                life = ServersLife(job, proxy, servers, deaths[1] if dies_at else None, kills)
            held.callback(life.close)
        np.testing.assert_array_equal(life.counts(), np.full(RECORDS, EPOCHS))
        assert life.master.status().records_trained == EPOCHS * RECORDS
    assert job.mode == "sync" or (len(ages) == life.master.status().version and min(ages) >= 0)
    assert job.staleness_bound is None or max(ages) <= job.staleness_bound


def test_a_push_whose_rows_are_lost_is_refused_and_computed_again(tmp_path: Path) -> None:
    """A store server is killed once it has the rows of a push, and before the master has the rest."""
    job = replace(ASYNC, epochs=1, validation_records=0)
    with tcp_proxy(1) as proxy, served(2, tmp_path) as (servers, rows), ExitStack() as held:
        life = ServersLife(job, proxy, servers, None, {})
        held.callback(life.close)
        ran = threading.Thread(target=life.master.run, args=(life,), daemon=True)
        ran.start()
        address = f"127.0.0.1:{proxy.port}"
        worker = Worker(job, address, Post(address), 0, rows)
        held.callback(worker.client.close)
        session = worker.born()
        outcomes: list[api.PushReply] = []
        while not (lease := worker.client.lease_tasks(worker.identity.incarnation, 1, 30.0)).finished:
            for task in lease.tasks:
                snapshot = worker.client.pull_dense(worker.identity.incarnation, None, 30.0)
                assert snapshot is not None
                left = worker.push_of(task, snapshot.version)
                if len(outcomes) == 3:
                    stopped_with(servers, 1)
                outcomes.append(worker.client.report_gradient(left))
        session.close()
        ran.join(timeout=60)
        refused = [reply for reply in outcomes if reply.outcome != "accepted"]
        assert [(reply.outcome, reply.reason) for reply in refused] == [
            ("stale", "a store server lost its rows: it is computed again")
        ]
        assert outcomes[3] is refused[0]
        np.testing.assert_array_equal(life.counts(), np.ones(RECORDS))
        assert life.master.status().version == len(outcomes) - 1
