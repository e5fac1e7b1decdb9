"""The engine Ray: each process is the child of an actor, in a placement group, and Ray starts actors again."""

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.extras import needs
from elastable.embedding_store.support.retry import Retry
from elastable.jobs.engines.engine import Command, Engine, LocalProcess, Processes, Seen, end_all
from elastable.process.exit_codes import ExitCode

MOST_RESTARTS = 100
"""How often Ray starts a process again."""

_LOOK_S = 0.2  # in which a process that answers at all has answered
_KNOWN_S = 0.1  # for so long it is as it was seen: every question takes a core a few milliseconds
_CHUNK_BYTES = 1 << 20  # of a log, in one answer
_LEAVE_S = 20.0  # for a process whose node is to go
_SETTLED_S = 60.0  # after which an actor that is said to be dead does not come back
_AWAY = (ConnectionError, TimeoutError, RuntimeError)  # what Ray raises where no cluster answers
_RESTARTED = (ExitCode.UNAVAILABLE, ExitCode.STORE_FAILED)
_WORKERS_RESTARTED = (*_RESTARTED, ExitCode.JOB_FAILED)  # a master that was killed is followed by another


@dataclass(frozen=True, slots=True)
class RoleNeeds:
    """What the processes of a role need.

    Attributes:
        least: How many begin together.
        most: How many there may be once the cluster has room for them.
        cpus, gpus: Of each.
        memory: Bytes of each.
    """

    least: int
    most: int
    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray calls it."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory)}
        return {name: amount for name, amount in named.items() if amount}


class ProcessActor:
    """The actor: one process, on whichever node Ray put it. It takes and gives strings, numbers and bytes alone."""

    def __init__(
        self, name: str, words: list[str], again: list[str], peers: dict[str, str], environment: dict[str, str]
    ) -> None:
        import ray

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this question is answered by way of one that is deprecated
            context = ray.get_runtime_context()
            restarted = context.was_current_actor_reconstructed
        environment = {"RAY_ADDRESS": context.gcs_address, **environment}  # where a model file makes its Ray Datasets
        self._host = ray.util.get_node_ip_address()
        self._life = f"{os.getpid()}"
        folder = Path.cwd() / ".elastable"  # of the copy of the working directory, which Ray deletes
        folder.mkdir(exist_ok=True)
        self._log = folder / f"{name}-{self._life}.log"
        # Ray's processes let Ctrl-C pass by, and children have the mask of whoever starts them.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._child = LocalProcess(Command(words, again, peers, environment), self._log, restarted)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGTERM, self._leave)

    def _leave(self, *_: object) -> None:
        """The node is about to go: a worker leaves after its micro-batch, and a master or store writes what it has."""
        end_all([self._child], 0.0, _LEAVE_S)
        sys.exit(0)

    def look(self, life: str, offset: int, peers: dict[str, str]) -> tuple[str, int, int, int, str, bytes]:
        """How the process is, and what it wrote.

        Args:
            life: Of the process that was seen last.
            offset: Bytes of its log that have arrived.
            peers: Role -> addresses.

        Returns:
            Which process it is, its id, whether it has ended, its exit code, its address or "", the next part of its
            log.
        """
        self._child.tell(peers)
        seen = self._child.look()
        with self._log.open("rb") as log:
            log.seek(offset if life == self._life else 0)
            written = log.read(_CHUNK_BYTES)
        address = Address.parse(seen.address) if seen.address else None
        if address is not None and address.host in ("0.0.0.0", "::"):
            address = replace(address, host=self._host)
        more = seen.code is not None and len(written) == _CHUNK_BYTES  # its end is told after its last words
        ended = seen.code is not None and not more
        return self._life, seen.pid, int(ended), seen.code or 0, str(address or ""), written

    def send(self, number: int) -> None:
        """Sends the process a signal."""
        self._child.send(signal.Signals(number))

    def end(self, leave_s: float, end_s: float) -> None:
        """Ends the process; as of `Processes`."""
        end_all([self._child], leave_s, end_s)


class RayProcesses(Processes):
    """Actors of one role; Ray starts again those whose process ends by a signal, or for want of a master or store."""

    def __init__(self, ray: Any, role: str, actors: Sequence[Any], folder: Path, leave_s: float, end_s: float) -> None:
        super().__init__(role, [folder / f"{role}-{number}.log" for number in range(len(actors))], leave_s, end_s)
        self._ray, self._actors = ray, actors
        self._seen, self._lives = [Seen()] * len(actors), [""] * len(actors)
        self._offsets, self._restarts = [0] * len(actors), [0] * len(actors)
        self._asked: dict[Any, int] = {}
        self._died = [(-math.inf, -math.inf)] * len(actors)  # when Ray said so first and last
        self._peers: dict[str, str] = {}
        self._looked, self._ending = -math.inf, False
        self._again = _WORKERS_RESTARTED if role == "worker" else _RESTARTED
        for log in self.logs:
            log.touch()

    def tell(self, role: str, addresses: Sequence[str]) -> None:
        self._peers[role] = ",".join(addresses)

    def look(self) -> Sequence[Seen]:
        if time.monotonic() - self._looked >= _KNOWN_S:
            self._ask()
            self._looked = time.monotonic()
        return list(self._seen)

    def _ask(self) -> None:
        """Asks each process how it is, and takes in what has been answered."""
        waiting = set(self._asked.values())
        for number, actor in enumerate(self._actors):
            if self._seen[number].code is None and number not in waiting:
                asked = actor.look.remote(self._lives[number], self._offsets[number], self._peers)
                self._asked[asked] = number
        if self._asked:
            try:
                answered, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=_LOOK_S)
            except (self._ray.exceptions.RayError, ConnectionError) as error:
                raise Unavailable(f"the Ray cluster is gone, and with it the job's {self.role}s: {error}") from error
            for each in answered:
                self._note(self._asked.pop(each), each)

    def _note(self, number: int, answer: Any) -> None:
        """Takes in what an actor answered."""
        errors = self._ray.exceptions
        try:
            life, pid, ended, code, address, written = self._ray.get(answer)
        except errors.ActorUnavailableError:
            self._seen[number] = Seen()  # it comes back
            return
        except errors.RayError as error:
            # With its node an actor is said to be dead, for a while even if it is to come back.
            now, (first, last) = time.monotonic(), self._died[number]
            first = now if now - last > _SETTLED_S else first
            self._died[number] = first, now
            back = isinstance(error, errors.ActorDiedError) and not error.actor_init_failed
            if back and now - first < _SETTLED_S and not self._ending:
                self._seen[number] = Seen()
                return
            # Not to be started again, or it could not be: this is all that there is to read.
            self._write(number, f"\n{error}\n".encode())
            self._seen[number] = replace(self._seen[number], code=self._seen[number].code or int(ExitCode.JOB_FAILED))
            return
        if life != self._lives[number]:
            self._lives[number], self._offsets[number] = life, 0
        self._write(number, written)
        self._offsets[number] += len(written)
        self._seen[number] = Seen(pid, code if ended else None, address or None)
        if self._ending:
            return
        if ended and (code < 0 or code in self._again) and self._restarts[number] < MOST_RESTARTS:
            self._restarts[number] += 1
            self._seen[number] = Seen()
            self._write(number, f"ended with exit code {code}; Ray starts it again\n".encode())
            self._ray.kill(self._actors[number], no_restart=False)

    def _write(self, number: int, written: bytes) -> None:
        if written:
            with self.logs[number].open("ab") as log:
                log.write(written)

    def interrupt(self) -> None:
        for actor in self._actors:
            actor.send.remote(int(signal.SIGINT))

    def end(self, leave_s: float, end_s: float) -> None:
        self._ending = True
        with suppress(self._ray.exceptions.RayError, ConnectionError):  # they end with their cluster, too
            self._end_actors(leave_s, end_s)

    def _end_actors(self, leave_s: float, end_s: float) -> None:
        ends = [
            actor.end.remote(leave_s, end_s)
            for actor, seen in zip(self._actors, self._seen, strict=True)
            if seen.pid and seen.code is None
        ]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=leave_s + end_s)
            self._ask()  # for their last words
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)


def is_local(where: str) -> bool:
    """Whether `where` (of `RayEngine`) is a Ray on this machine that is started for the job and ends with it."""
    return where == "ray" and not os.environ.get("RAY_ADDRESS")


class RayEngine(Engine):
    """A Ray cluster, for one job.

    Args:
        where: "ray": the one that RAY_ADDRESS names, else one that is started here for the job; or ray://HOST:PORT.
        parts: Role -> what its processes need; those that begin together are placed together.
        working_dir: Folder that every node gets a copy of.
        leave_out: Paths below it that are not copied.
        logs: Folder of this machine for logs.
        deadline_s: How long the cluster may take to have room.

    Raises:
        NotInstalled: the extra "ray" is not there.
        Unavailable: the cluster is not reached, or has no room; says for what.
        BadInput: the folder cannot be copied; this process has a connection to Ray.
    """

    def __init__(
        self,
        where: str,
        parts: Mapping[str, RoleNeeds],
        working_dir: Path,
        leave_out: Sequence[str],
        logs: Path,
        deadline_s: float,
    ) -> None:
        with needs("--on ray"):
            import ray
        if ray.is_initialized():
            raise BadInput(f"--on {where}: this process uses Ray already; ray.shutdown() ends that, for the job's own")
        self._ray, self._parts, self._logs, self._group = ray, parts, logs, None
        settings: dict[str, object] = {"address": None if where == "ray" else where}
        if is_local(where):
            settings = {"address": "local", "include_dashboard": False, "num_cpus": self._own_cpus()}
        files = {"working_dir": str(working_dir), "excludes": list(leave_out)}
        settings |= {"runtime_env": files, "log_to_driver": False, "logging_level": "error"}
        try:  # a client server that is busy gives up before we do
            Retry(deadline_s, lambda error: isinstance(error, _AWAY)).call(lambda: ray.init(**settings))
        except _AWAY as error:
            raise Unavailable(
                f"--on {where}: the cluster is not reached: {error}; one that asks for Ray's token is called with "
                "RAY_AUTH_MODE=token"
            ) from error
        except ValueError as error:  # of the folder: too large, not there
            raise BadInput(f"--on {where}: {error}") from error
        try:
            self._group = self._reserved(where, deadline_s)
        except BaseException:
            ray.shutdown()
            raise

    def _own_cpus(self) -> float:
        """Of a Ray that is for this job alone: what it asks for, however many there are, and one for Ray Datasets."""
        return max(os.cpu_count() or 1, 1 + sum(part.most * part.cpus for part in self._parts.values()))

    def _reserved(self, where: str, deadline_s: float) -> Any:
        bundles = [part.bundle for part in self._parts.values() for _ in range(part.least)]
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        if not group.wait(timeout_seconds=deadline_s):
            there = self._ray.cluster_resources()
            has = ", ".join(f"{name} {there.get(name, 0):g}" for name in ("CPU", "GPU", "memory"))
            wants = ", ".join(f"{part.least} x {role} with {part.bundle}" for role, part in self._parts.items())
            self._ray.util.remove_placement_group(group)
            raise Unavailable(f"--on {where}: no room within {deadline_s:g} s for {wants}; in all there are {has}")
        return group

    def start(self, role: str, commands: Sequence[Command], leave_s: float, end_s: float) -> Processes:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        part = self._parts[role]
        first = sum(self._parts[other].least for other in list(self._parts)[: list(self._parts).index(role)])
        made = self._ray.remote(ProcessActor)
        actors = []
        for number, command in enumerate(commands):
            bundle = part.bundle
            options: dict[str, object] = {"num_cpus": part.cpus, "num_gpus": part.gpus, "max_restarts": -1}
            if "memory" in bundle:
                options["memory"] = bundle["memory"]
            if number < part.least:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=first + number
                )
            given = list(command.words), list(command.again), dict(command.peers), dict(command.environment)
            actors.append(made.options(**options).remote(f"{role}-{number}", *given))
        return RayProcesses(self._ray, role, actors, self._logs, leave_s, end_s)

    def __exit__(self, *raised: object) -> None:
        self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()
