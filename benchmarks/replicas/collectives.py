"""Collectives of replica groups, compared with mpi4py's blocking ones, a copy of as many bytes, and TensorFlow's.

mpiexec starts the processes; threads run in this process. TensorFlow's collectives run between two processes, with
`MultiWorkerMirroredStrategy`, after the others have ended.

    python -m benchmarks.replicas.collectives
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.harness import Rounds, Row, Work, compare, interleaved, publish
from elastable.embedding_store.contract.arrays import Array
from elastable.process.heap import keep_freed_memory
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.groups.world import replica_group

_SIZES = (2, 4)
_BYTES = (4 << 10, 1 << 20, 16 << 20)
_ROUNDS = 7
_LIMIT_S = 900.0
_COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")


def main() -> None:
    """Measures, prints and writes `results/collectives.json`."""
    rows: list[Row] = []
    for size in _SIZES:
        processes, threads = _in_processes(size), run_threads(size, _measure)[0]
        for name, rounds in processes.items():
            rows.append(compare(f"{name}, {size} processes, against mpi4py", "us", rounds["ours"], rounds["raw"]))
            rows.append(compare(f"{name}, {size} processes, against a copy", "us", rounds["ours"], rounds["copy"]))
            rows.append(
                compare(f"{name}, {size} threads, against a copy", "us", threads[name]["ours"], threads[name]["copy"])
            )
        if size == 2:
            rows.append(_against_tensorflow(processes))
    publish("collectives", "Collectives of a replica group, one call; arrays of so many bytes a member", rows)


def _against_tensorflow(processes: Mapping[str, Rounds]) -> Row:
    ours, theirs = processes[f"all_reduce of {_size(_BYTES[-1])}"]["ours"], _tensorflow(2)
    name = f"all_reduce of {_size(_BYTES[-1])}, 2 processes, against TensorFlow's"
    value, reference = statistics.median(ours), statistics.median(theirs)
    return Row(name, value, "us", reference, reference / value, note="one after the other")


def _in_processes(size: int) -> dict[str, Rounds]:
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "rounds.json"
        command = [
            mpiexec,
            "-n",
            str(size),
            sys.executable,
            "-m",
            "benchmarks.replicas.collectives",
            "--member",
            str(out),
        ]
        subprocess.run(command, check=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
        found: dict[str, Rounds] = json.loads(out.read_text())
    return found


def _tensorflow(size: int) -> list[float]:
    """Microseconds of TensorFlow's all-reduce between processes, as the first one sees it."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    workers = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    running = []
    for rank in range(size):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(task), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "benchmarks.replicas.collectives", "--tensorflow"]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    said = [process.communicate(timeout=_LIMIT_S)[0] for process in running]
    found: list[float] = json.loads(said[0].splitlines()[-1])
    return found


def _tensorflow_member() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    array = tf.random.normal([_BYTES[-1] // 4])

    @tf.function  # type: ignore[untyped-decorator]
    def reduced() -> object:
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", array))

    microseconds = []
    for _ in range(5 + 7 * _ROUNDS):
        began = time.perf_counter()
        reduced().numpy()
        microseconds.append((time.perf_counter() - began) * 1e6)
    print(json.dumps([statistics.median(microseconds[5 + number :: _ROUNDS]) for number in range(_ROUNDS)]))


def _measure(group: ReplicaGroup, raw: Callable[[str, int], Work] | None = None) -> dict[str, Rounds]:
    """Microseconds of every collective at every size, as this member sees it; every member calls it."""
    found: dict[str, Rounds] = {}
    for nbytes in _BYTES:
        repeats = 100 if nbytes < 1 << 16 else 12
        array = np.random.default_rng(group.rank).normal(size=(group.size, nbytes // 8 // group.size))
        copy = np.empty_like(array)
        for name in _COLLECTIVES:
            works: dict[str, Work] = {"ours": _ours(group, name, array), "copy": _copy(copy, array)}
            if raw is not None:
                works["raw"] = raw(name, nbytes)
            contenders = {key: _us(group, work, repeats) for key, work in works.items()}
            found[f"{name} of {_size(nbytes)}"] = interleaved(contenders, _ROUNDS)
    return found


def _ours(group: ReplicaGroup, name: str, array: Array) -> Work:
    call = getattr(group, name)
    handed = array[group.rank] if name == "all_gather" else array
    return lambda: call(handed)


def _copy(into: Array, array: Array) -> Work:
    return lambda: np.copyto(into, array)


def _us(group: ReplicaGroup, work: Work, repeats: int) -> Callable[[], float]:
    """Its median time; the members begin each call together."""

    def measure() -> float:
        seconds = []
        work()
        for _ in range(repeats):
            group.barrier()
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return sorted(seconds)[repeats // 2] * 1e6

    return measure


def _size(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def _member(out: Path) -> None:
    """One process of the processes' side; rank 0 writes what it saw."""
    group = replica_group(deadline_s=300.0)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def raw(name: str, nbytes: int) -> Work:
        array = np.random.default_rng(comm.rank).normal(size=(comm.size, nbytes // 8 // comm.size))
        into, part = np.empty_like(array), np.empty_like(array[0])
        calls: Mapping[str, Work] = {
            "all_gather": lambda: comm.Allgather(array[0], into),
            "all_to_all": lambda: comm.Alltoall(array, into),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(array, part),
            "all_reduce": lambda: comm.Allreduce(array, into),
        }
        return calls[name]

    found = _measure(group, raw)
    if group.rank == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    keep_freed_memory()  # as every process of the `elastable` command does
    if "--tensorflow" in sys.argv:
        _tensorflow_member()
    elif "--member" in sys.argv:
        _member(Path(sys.argv[2]))
    else:
        main()
