"""Schedules of faults: a pure function of a kind and a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.chaos import stores
from tests.chaos.records import MICRO_BATCH, RECORDS

LEASE_S = 1.0
"""Of a micro-batch, in every schedule: so that a fault may be longer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is computed; schedules of one shape end with the same numbers.

    Attributes:
        mode: As of `elastable master`; asynchronous jobs never repeat exactly, and keep the count of trainings alone.
    """

    model: str  # "light" (NumPy, `tests.chaos.light_job`) or "keras" (`tests.chaos.job`)
    optimizer: str  # as in CHAOS_OPTIMIZER of `tests.chaos.job`
    grads_to_wait: int  # micro-batches of a version
    epochs: int = 2  # passes over the records
    lazy: bool = True  # whether a step moves the rows alone that its batch touches
    replay_epoch: int = 0  # versions between the rounding of rows that follow every step: those between checkpoints
    mode: str = "sync"

    @property
    def micro_batches(self) -> int:
        return self.epochs * RECORDS // MICRO_BATCH

    @property
    def versions(self) -> int:
        return self.micro_batches // self.grads_to_wait


_OPTIMIZERS = ("sgd", "adagrad", "adam", "adam")
_FOLLOWED = ("momentum", "adam", "adamw", "rmsprop")  # which move rows without a gradient
_KERAS_OF_ALL = 0.1


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens when the job is at a certain place.

    Attributes:
        gate, number: Where; see `tests.chaos.child`.
        target: "master", "worker" (the one at the gate, or any), "service" (whichever Redis server is the primary),
            a server by its name in `tests.chaos.stores`, or a link as "worker-master".
    """

    gate: str
    number: int
    action: str  # one of `tests.chaos.conductor.STRIKES`
    target: str
    seconds: float  # how long it lasts; of a killed process, until it is started again

    def __str__(self) -> str:
        return f"{self.action} {self.target} at {self.gate} {self.number} ({self.seconds:.2f} s)"


@dataclass(frozen=True, slots=True)
class Schedule:
    kind: str  # one of `tests.chaos.stores.KINDS`
    seed: int  # that it was made from
    shape: Shape  # what is computed
    workers: int  # how many there are
    checkpoint_every: int  # versions between checkpoints
    evaluate_every: int  # versions between evaluations beside training
    transport: str  # as of `elastable master`
    faults: tuple[Fault, ...]  # in no particular order
    keep: int = 0  # checkpoints that stay; 0: all
    pause_s: float = 0.0  # that reading a micro-batch takes longer
    store: str = "memory"  # where rows are, as `tests.chaos.stores` has it

    def __str__(self) -> str:
        description = "; ".join(map(str, self.faults)) or "no fault"
        where = "" if self.kind in _OLDER else f" on {self.store}"
        return (
            f"{self.kind} {self.seed}{where}: {self.shape.model}, {self.shape.optimizer} x {self.shape.grads_to_wait}, "
            f"{self.workers} workers, a checkpoint every {self.checkpoint_every} versions, an evaluation every "
            f"{self.evaluate_every}, transport {self.transport}: {description}"
        )


_PAUSE_S = 0.25  # a job as long as it takes Sentinels to make a server that was the primary a replica
_OLDER = ("memory", "redis")  # whose schedules have no store in their name
_WORKER_GATES = ("prepared", "looked-up", "computed", "reported")
_PUSH_GATES = ("arrived", "counted")
_VERSION_GATES = ("commit", "rows", "version")
_COUNTED_BY_VERSION = ("commit", "rows", "version", "stored", "half", "logged")


def schedule_of(kind: str, seed: int, model: str | None = None, faults: int | None = None) -> Schedule:
    """The schedule of that kind and seed; where it is not said, one in ten is of Keras, with one to four faults."""
    # A string: the hash of a tuple differs between processes.
    chance = random.Random(f"{kind}/{seed}")
    drawn = "keras" if chance.random() < _KERAS_OF_ALL else "light"
    store, lazy = stores.store_of(kind, seed), not kind.startswith("every")
    shape = Shape(
        model or drawn, chance.choice(_OPTIMIZERS if lazy else _FOLLOWED), chance.choice((2, 4, 4)), lazy=lazy
    )
    if kind == "async":
        shape = replace(shape, grads_to_wait=1, mode="async")
    count = chance.choice((1, 1, 2, 2, 3, 4)) if faults is None else faults
    struck = tuple(fault for _ in range(count) for fault in _faults(chance, store, shape))
    made = Schedule(
        kind=kind,
        seed=seed,
        shape=shape,
        workers=chance.choice((1, 2, 2, 3)),
        checkpoint_every=chance.choice((2, 3, 5)),
        evaluate_every=chance.choice((1, 3, 5)),
        transport=chance.choice(("auto", "grpc")),
        faults=struck,
        store=store,
        pause_s=_PAUSE_S if kind == "sentinel" else 0.0,
    )
    return made if lazy else replace(made, shape=replace(shape, replay_epoch=made.checkpoint_every))


def _faults(chance: random.Random, store: str, shape: Shape) -> list[Fault]:
    words = _drawn(chance, faults_of(store, shape.lazy))
    action, target = words.split()
    gate, number = _place(chance, store, shape, target)
    if words == "fill master" and not (stores.in_files(store) and chance.random() < 0.5):
        gate, number = "disk", chance.randrange(1, 60)
    found = [Fault(gate, number, action, target, _seconds(chance, action))]
    if (action, target) == ("kill", "master") and chance.random() < 0.25:
        # Again, while it takes over.
        gate = chance.choice(("start", "restore", "disk"))
        found.append(Fault(gate, 2 if gate == "start" else chance.randrange(1, 5), "kill", "master", 0.1))
    return found


def _drawn(chance: random.Random, weighted: Sequence[tuple[str, int]]) -> str:
    return chance.choices([words for words, _ in weighted], [weight for _, weight in weighted])[0]


def _place(chance: random.Random, store: str, shape: Shape, target: str) -> tuple[str, int]:
    if target == "worker":
        gates: tuple[str, ...] = _WORKER_GATES
    elif target != "master":
        gates = (*_WORKER_GATES[1:], *_PUSH_GATES, *_VERSION_GATES)
    else:
        gates = (*_PUSH_GATES, *_VERSION_GATES, *_VERSION_GATES, "disk")
    gate = chance.choice((*gates, *(gates_of(store) if target != "worker" else ())))
    if gate in _COUNTED_BY_VERSION:
        return gate, chance.randrange(1, shape.versions)
    if gate == "disk":
        return gate, chance.randrange(1, 80)
    if gate in ("writing", "written", "stated"):
        return gate, chance.randrange(1, 15)
    if gate in ("exec", "exec2"):
        return gate, chance.randrange(1, 12 * shape.versions)
    return gate, chance.randrange(shape.micro_batches - shape.grads_to_wait)


def _seconds(chance: random.Random, action: str) -> float:
    if action in ("kill", "fill"):
        return chance.choice((0.0, 0.1, 0.5))
    if action in ("fail", "failover"):
        return 4.0  # until the one that fell comes back: Sentinels agree on another one before that
    if action in ("stop", "supersede"):
        return chance.choice((0.1, 0.5, 1.5 * LEASE_S))
    if action == "silence":
        return chance.choice((0.5, 1.5 * LEASE_S))
    return 0.5


# Action and target, and how often of all.
_Weighted = tuple[tuple[str, int], ...]
_ALWAYS: _Weighted = (
    ("kill worker", 6), ("kill master", 5),
    ("stop worker", 4), ("stop master", 2), ("cut worker-master", 4),
    ("delay worker-master", 2), ("silence worker-master", 1), ("fill master", 2),
)  # fmt: skip
_IN_MASTER: _Weighted = (("supersede master", 2),)
_IN_FILES: _Weighted = (("kill master", 3), ("fill master", 4))
_RESUMED: _Weighted = (("kill master", 8),)
_OF_REDIS: _Weighted = (
    ("supersede master", 4),
    ("kill redis", 4), ("stop redis", 2), ("fill redis", 2), ("cut master-redis", 4),
    ("delay master-redis", 1), ("silence master-redis", 1),
)  # fmt: skip
_OF_STORE: _Weighted = (
    ("kill store", 2), ("stop store", 2), ("cut master-store", 4), ("cut worker-store", 2),
    ("delay master-store", 1), ("delay worker-store", 1),
)  # fmt: skip
_OF_MANY: _Weighted = (("kill master", 8), ("supersede master", 8))
_FAILOVERS: _Weighted = ((f"fail {stores.SERVICE}", 8), (f"failover {stores.SERVICE}", 8))


def faults_of(store: str, lazy: bool) -> _Weighted:
    """Action and target of every fault that schedules of such a store have, and how often of all."""
    return (*_ALWAYS, *_of_store(store), *(() if lazy else _RESUMED))


def _of_store(store: str) -> _Weighted:
    servers = (*stores.redis_of(store), *stores.processes_of(store))
    if not servers:
        return _IN_FILES if stores.in_files(store) else _IN_MASTER
    if servers[0] not in stores.REDIS_SERVERS:
        return _of_many(servers)
    faults = _OF_REDIS
    if "redis2" in servers:
        faults += _renamed(faults, "redis", "redis2")
        faults += (("kill master", 5),)  # between the shards
    return faults


def _of_many(servers: tuple[str, ...]) -> _Weighted:
    name, of_one = (
        ("redis", _OF_REDIS) if servers[0] in (*stores.CLUSTER, *stores.PRIMARY_AND_REPLICA) else ("store", _OF_STORE)
    )
    faults = tuple(fault for server in servers for fault in _renamed(of_one, name, server))
    return faults + _OF_MANY + (_FAILOVERS if servers == stores.PRIMARY_AND_REPLICA else ())


def _renamed(faults: _Weighted, name: str, server: str) -> _Weighted:
    return tuple((words.replace(name, server), often) for words, often in faults if name in words)


def gates_of(store: str) -> tuple[str, ...]:
    """Places that only a process with such a store comes to."""
    servers = (*stores.redis_of(store), *stores.processes_of(store))
    if "flush=" in store:
        return ("logged",) * 4 + ("writing", "written", "stated") * 4
    if "redis2" in servers:
        return ("exec",) * 3 + ("exec2",) * 3 + ("half",) * 6
    if servers == stores.CLUSTER:
        return ("exec", "exec2", "exec3", "logged") * 2
    if servers == stores.PRIMARY_AND_REPLICA:
        return ("exec", "logged") * 3
    of_first = {"redis": ("exec",) * 6, "shard0": ("stored",) * 8}
    return of_first.get(servers[0], ()) if servers else ()
