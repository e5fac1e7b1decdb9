"""`make chaos-stream`: processes of a job on events are killed; each event counts once, and no bit differs."""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from elastable.embedding_store.errors import ElastableError
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.rpc.client import MasterClient
from tests.chaos.__main__ import fast_folder
from tests.elastable.jobs import event_job
from tests.elastable.kept_jobs import assert_same
from tests.elastable.processes import Running, elastable, run_elastable
from tests.ports import free_address
from tests.servers import Server, redis_binary, running_server, valkey_binary

_JOB = Path(event_job.__file__)
_SENT_AT_ONCE = 10_000
_ANSWER_S, _AGAIN_S = 5.0, 0.1
_DURABLE = ("--appendonly", "yes", "--appendfsync", "no")  # processes are killed, never the machine


class _Stuck(Exception):
    """The job cannot go on; says why."""


def main(words: Sequence[str] | None = None) -> int:
    """Kills as often as asked for and prints a tally; 1 if the job ended in another way than an undisturbed one."""
    parser = argparse.ArgumentParser(prog="make chaos-stream ARGS=...", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=100, help="of workers, masters, store servers and the broker")
    parser.add_argument("--seed", type=int, default=0, help="decides who is killed, and at which version")
    parser.add_argument("--micro-batch-size", type=int, default=512, help="two of them make a version")
    parser.add_argument("--limit", type=float, default=3 * 3600.0, help="seconds after which the job has failed")
    asked = parser.parse_args(words)
    home = Path(tempfile.mkdtemp(prefix="chaos-stream-", dir=fast_folder()))
    binary = valkey_binary() or redis_binary()
    assert binary is not None, "there is no Redis or Valkey server here"
    with running_server(binary, home / "broker", _DURABLE) as broker:
        with broker.client() as client:
            for first in range(0, asked.events, _SENT_AT_ONCE):
                event_job.send(client, range(first, min(first + _SENT_AT_ONCE, asked.events)))
        size = ("--micro-batch-size", str(asked.micro_batch_size))
        options = ("--until", "end", "--grads-to-wait", "2", "--seed", "3", "--no-export", "--deadline", "300", *size)
        calm = ("train", _JOB, "--workers", "1", *options, "--run-dir", home / "calm")
        began, ran = time.monotonic(), run_elastable(*calm, env={"EVENTS": broker.url}, limit_s=asked.limit)
        assert ran.code == 0, f"{ran.out}\n{ran.err}"
        print(f"undisturbed: {asked.events:,} events in {time.monotonic() - began:.0f} s", flush=True)
        versions = -(-asked.events // (2 * asked.micro_batch_size))
        chance = random.Random(asked.seed)
        at = sorted(chance.choices(range(1, versions - 1), k=asked.kills))
        job = _Job(home, broker, options, time.monotonic() + asked.limit)
        began, problem = time.monotonic(), ""
        try:
            with job.held:
                job.begin()
                for version in at:
                    if not job.goes_on_at(version):
                        break
                    job.kill(chance.choice(["worker-0", "worker-1", "master", "store-0", "store-1", "broker"]))
                job.end()
            found = _last(home / "runs")
            assert_same(found, _last(home / "calm"))
            if (trained := found.progress().records) != asked.events:
                problem = f"{trained:,} of {asked.events:,} events count"
        except (AssertionError, _Stuck) as error:
            problem = str(error) or "the last checkpoint is not that of the undisturbed job"
    for name, count in sorted(job.killed.items()):
        print(f"  {name:<10} {count}")
    print(f"killed {job.killed.total()} in {time.monotonic() - began:.0f} s, seed {asked.seed}")
    print(f"DIVERGED: {problem}; logs: {home}" if problem else "DIVERGENCES 0", flush=True)
    if not problem:
        shutil.rmtree(home, ignore_errors=True)
    return int(bool(problem))


def _last(runs: Path) -> Checkpoint:
    return open_checkpoint((runs / "latest").resolve() / "checkpoints")


class _Job:
    """A master, two workers and two store servers, each started again in its place; `held` ends them all."""

    def __init__(self, home: Path, broker: Server, options: Sequence[str], give_up: float) -> None:
        self._home, self._broker, self._give_up = home, broker, give_up
        self.held, self.killed = ExitStack(), Counter[str]()
        self._running: dict[str, Running] = {}
        self._address, places = free_address(), [free_address(), free_address()]
        self._commands: dict[str, tuple[str | Path, ...]] = {}
        for number, place in enumerate(places):
            rows = ("--store", f"memory?log={home}/rows-{number}")
            self._commands[f"store-{number}"] = ("store", "--listen", place, *rows)
        where = ("--stores", ",".join(places), "--listen", self._address, "--run-dir", home / "runs", "--resume")
        self._commands["master"] = ("master", _JOB, *options, *where)
        for number in range(2):
            self._commands[f"worker-{number}"] = ("worker", _JOB, "--master", self._address, "--deadline", "300")

    def begin(self) -> None:
        for name in self._commands:
            self._start(name)

    def _start(self, name: str) -> None:
        log = f"{name}-{self.killed[name]}"
        events = {"EVENTS": self._broker.url}
        self._running[name] = self.held.enter_context(
            elastable(self._home, *self._commands[name], env=events, name=log)
        )

    def goes_on_at(self, version: int) -> bool:
        """Waits for that version; whether the job has not ended by then. Raises `_Stuck`."""
        while self._running["master"].process.poll() != 0:
            self._require_alive()
            with suppress(ElastableError), MasterClient(self._address, _ANSWER_S) as master:
                if master.status().version >= version:
                    return True
            time.sleep(_AGAIN_S)
        return False

    def kill(self, name: str) -> None:
        """Kills a process as it is, and starts it again."""
        if name == "broker":
            self._broker.kill()
            self._broker.start()
        else:
            self._running[name].kill()
        self.killed[name] += 1
        if name != "broker":
            self._start(name)

    def end(self) -> None:
        """Until all is trained: a worker that was started last may find nobody. Raises `_Stuck`."""
        master = self._running["master"]
        if code := master.wait(max(1.0, self._give_up - time.monotonic())):
            raise _Stuck(f"the master ended with {code}: {master.err[-2_000:]}")

    def _require_alive(self) -> None:
        for name, running in self._running.items():
            if code := running.process.poll():
                raise _Stuck(f"{name} has ended with {code}: {running.err[-2_000:]}")
        if time.monotonic() > self._give_up:
            raise _Stuck("the job takes too long")


if __name__ == "__main__":
    sys.exit(main())
