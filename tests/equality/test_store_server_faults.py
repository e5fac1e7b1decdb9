"""Jobs over store servers that die, lose rows or are replaced train the numbers of a job that nothing happens to."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.shards.server_contract import Committed, PushedCommit, RowPush, RowPushReply
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.master.checkpoints.checkpoint import list_checkpoints
from elastable.master.checkpoints.storage.checkpoint_locations import checkpoint_names, files_at
from elastable.master.rpc.client import MasterClient
from elastable.process.exit_codes import ExitCode
from tests.embedding_store.shards.served_shards import ServedShard
from tests.equality.jobs import Numbers, Running, differing, train
from tests.equality.test_store_servers import StoreProcess
from tests.waiting import until

DEADLINE_S = 180.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], list[ServedShard]]]:
    """Starts store servers with a log in this process."""
    with ExitStack() as held:
        count = 0

        def started(more: int) -> list[ServedShard]:
            nonlocal count
            new = [ServedShard(f"memory?log={tmp_path}/log-{count + n}") for n in range(more)]
            count += more
            for server in new:
                held.callback(server.stop)
            return new

        yield started


class Faults:
    """Kills store servers in the middle of their calls, and starts them again.

    Args:
        servers: All of the job.
        kills: (step, version, whether the server has done its work) -> which servers die then, that of the call first.
    """

    def __init__(self, servers: list[ServedShard], kills: dict[tuple[str, int, bool], list[int]]) -> None:
        self.left = dict(kills)
        self._servers, self._lock = servers, threading.Lock()
        self.master_waits, self.master_died = threading.Event(), threading.Event()
        self.master_version = 10**9

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for step, version in (
            ("push_rows", lambda push, *_: push.version + 1),
            ("measure", lambda sums, *_: sums.version + 1),
            ("commit", lambda commit, *_: commit.version),
            ("save_rows", lambda save, source, *_: source.version() if save.tables else -1),
        ):
            monkeypatch.setattr(Shard, step, self._faulty(step, getattr(Shard, step), version))

    def _faulty(self, step: str, work: Callable[..., object], version: Callable[..., int]) -> Callable[..., object]:
        def call(shard: Shard, *of: object) -> object:
            at = version(*of)
            self._perhaps(step, at, False, shard)
            done = work(shard, *of)
            if step == "measure" and at == self.master_version:
                self.master_waits.set()
                assert self.master_died.wait(DEADLINE_S)
            self._perhaps(step, at, True, shard)
            return done

        return call

    def _perhaps(self, step: str, version: int, done: bool, shard: Shard) -> None:
        with self._lock:
            due = next(
                (key for key, dying in self.left.items()
                 if key[0] == step and key[1] <= version and key[2] == done and self._servers[dying[0]].shard is shard),
                None,
            )  # fmt: skip
            dying = [] if due is None else self.left.pop(due)
        if not dying:
            return
        for number in dying:
            self._servers[number].cut()

        def start_again() -> None:
            for number in dying:
                self._servers[number].stop()
            for number in dying:
                self._servers[number].start()

        threading.Thread(target=start_again).start()
        raise StoreFailed("nobody reads this: the server is dead")


def test_servers_die_at_every_step_and_the_master_between_two(
    clipped: Numbers, tmp_path: Path, start: Callable[[int], list[ServedShard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = start(3)
    faults = Faults(
        servers,
        {
            ("push_rows", 4, False): [0],
            ("push_rows", 7, True): [1],
            ("measure", 10, False): [2],
            ("measure", 13, True): [0],
            ("commit", 16, False): [1],
            ("commit", 19, True): [2],
            ("save_rows", 20, False): [0],
            ("commit", 23, True): [0, 1],  # two at once
        },
    )
    faults.master_version = 30  # norms are known everywhere, and nothing is decided
    faults.install(monkeypatch)

    def kill_master(job: Running) -> None:
        assert faults.master_waits.wait(DEADLINE_S), "norms of version 30 were never asked for"
        job.processes[0].kill()
        assert {server.store.version() for server in servers} == {29}
        faults.master_died.set()
        job.start_master("--resume", "--listen", job.address)

    stores = [server.address for server in servers]
    options = ("--checkpoint-every", "10", "--full-every", "3", "--keep", "0")
    assert differing(clipped, train(tmp_path, 2, "clipped", stores=stores, during=kill_master, options=options)) == []
    assert faults.left == {}
    listed = list_checkpoints(tmp_path / "checkpoints", verify=True)
    # A checkpoint that is saved from a pin ends with its server; one that is saved between two versions goes on.
    assert [one.damage for one in listed] == [""] * len(listed)
    assert listed[-1].checkpoint is not None
    assert listed[-1].checkpoint.version == 50
    assert files_at(tmp_path / "checkpoints").drafts() == []


def test_a_worker_dies_between_two_servers_and_a_slow_server_holds_up_nobody_else(
    clipped: Numbers, tmp_path: Path, start: Callable[[int], list[ServedShard]]
) -> None:
    servers = start(2)
    held = {8: False, 16: True}  # version -> whether the second server still reads the push of the worker that dies
    between, died, slow, shown = ({at: threading.Event() for at in (*held, 24)} for _ in range(4))
    accepted = {at: threading.Event() for at in held}
    pushes, commit = [server.shard.push_rows for server in servers], servers[1].shard.commit

    def first(push: RowPush, session: bytes) -> RowPushReply:
        outcome = pushes[0](push, session)
        if push.version in accepted:
            accepted[push.version].set()
        return outcome

    def second(push: RowPush, session: bytes) -> RowPushReply:
        if push.version in held and not between[push.version].is_set():
            assert accepted[push.version].wait(DEADLINE_S), "the first server got no push"
            between[push.version].set()
            assert died[push.version].wait(DEADLINE_S)
            if not held[push.version]:
                raise StoreFailed("nobody reads this: the worker is dead")
        return pushes[1](push, session)

    def slowly(pushed: PushedCommit, secret: bytes) -> Committed:
        if pushed.version == 24:
            slow[24].set()
            assert shown[24].wait(DEADLINE_S)
        return commit(pushed, secret)

    servers[0].shard.push_rows = first  # type: ignore[method-assign, assignment]
    servers[1].shard.push_rows = second  # type: ignore[method-assign, assignment]
    servers[1].shard.commit = slowly  # type: ignore[method-assign, assignment]

    def disturb(job: Running) -> None:
        for at in held:
            assert between[at].wait(DEADLINE_S), f"no push of version {at} reached the second server"
            job.processes[1].kill()
            died[at].set()
            del job.processes[1]
            job.start_worker()
        assert slow[24].wait(DEADLINE_S), "version 24 was never committed"
        with (
            RemoteSource(servers[0].address, 60.0) as other,
            RemoteSource(servers[1].address, 60.0) as late,
            MasterClient(job.address, deadline_s=60) as master,
        ):
            assert other.wait_for_version(24, 60.0), "a server waits for another one"
            assert late.version() == 23, "a server that is slow with its commit still answers"
            until(
                lambda: [it.address for it in master.status().servers if it.waited_s > 0] == [servers[1].address],
                DEADLINE_S,
            )
        shown[24].set()

    stores = [server.address for server in servers]
    assert differing(clipped, train(tmp_path, 1, "clipped", stores=stores, during=disturb)) == []


@pytest.mark.slow  # tests/elastable/jobs resumes jobs of one store that has lost rows
@pytest.mark.parametrize("older", [False, True])
def test_a_job_goes_on_from_its_checkpoint_where_a_server_comes_back_without_its_rows(
    clipped: Numbers, tmp_path: Path, older: bool
) -> None:
    logs = [tmp_path / f"log-{number}" for number in range(2)]
    with ExitStack() as held:
        servers = [StoreProcess(tmp_path / f"store-{n}.log", f"memory?log={log}") for n, log in enumerate(logs)]
        for server in servers:
            held.callback(server.kill)

        def lose(job: Running) -> None:
            if older:
                job.until_version(3)
                servers[1].kill()
                shutil.copytree(logs[1], tmp_path / "kept")
                servers[1].start()
            until(lambda: bool(checkpoint_names(files_at(tmp_path / "checkpoints"))), DEADLINE_S)
            job.until_version(15)
            servers[1].kill()
            shutil.rmtree(logs[1])
            if older:
                shutil.copytree(tmp_path / "kept", logs[1])
            servers[1].start()
            ended = [process.wait(DEADLINE_S) for process in job.processes]
            assert ended == [ExitCode.STORE_FAILED] * 3, job.processes[0].err
            assert "ShardLost: " in job.processes[0].err
            job.start_master("--resume", "--listen", job.address)
            del job.processes[1:]
            for _ in range(2):
                job.start_worker()

        stores, options = [server.address for server in servers], ("--checkpoint-every", "10")
        numbers = train(tmp_path, 2, "clipped", stores=stores, during=lose, options=options)
    assert differing(clipped, numbers) == []


@pytest.mark.slow  # tests/embedding_store/shards moves rows, interrupted at every call
def test_a_job_goes_on_where_its_rows_were_moved_and_at_another_address(
    clipped: Numbers, tmp_path: Path, start: Callable[[int], list[ServedShard]]
) -> None:
    """Two servers become three; the command is killed first; then one of the three gets another port."""
    old, new = start(2), start(3)
    lists = [",".join(server.address for server in servers) for servers in (old, new)]
    command = [sys.executable, "-m", "elastable", "store", "rescale", "--from", lists[0], "--to", lists[1]]
    copying = threading.Event()

    def move(job: Running) -> None:
        job.until_version(10)
        for process in job.processes:
            process.kill()
        put, killed = new[1].store.put, threading.Event()

        def held(table: str, blocks: Iterable[RowBlock]) -> None:
            copying.set()
            assert killed.wait(DEADLINE_S)
            put(table, blocks)

        new[1].store.put = held  # type: ignore[method-assign]
        with (tmp_path / "rescale.log").open("wb") as log:
            moving = subprocess.Popen(command, stdout=log, stderr=log)
            assert copying.wait(DEADLINE_S), (tmp_path / "rescale.log").read_text()
            moving.kill()
            moving.wait(timeout=60)
        killed.set()
        new[1].store.put = put  # type: ignore[method-assign]
        again = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert again.returncode == 0, again.stderr
        assert f"go on with --stores {lists[1]} --resume" in again.stdout
        job.start_master("--resume", "--listen", job.address)
        assert job.processes[0].wait(DEADLINE_S) == ExitCode.BAD_INPUT
        assert f"write --stores {lists[1]} instead of" in job.processes[0].err
        new[2].move()
        moved = ",".join(server.address for server in new)
        assert moved != lists[1]
        job.command[job.command.index(lists[0])] = moved
        job.start_master("--resume", "--listen", job.address)
        del job.processes[1:]
        for _ in range(2):
            job.start_worker()

    stores = [server.address for server in old]
    assert differing(clipped, train(tmp_path, 2, "clipped", stores=stores, during=move)) == []
