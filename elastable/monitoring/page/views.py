"""What the live page shows, as plain JSON values."""

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from elastable.embedding_store import errors
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.measures import Histogram, StoreMeasures
from elastable.embedding_store.shards.server_contract import ServerStatus
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.api import GoneWorker, JobStatus, WorkerIdentity, WorkerStatus
from elastable.monitoring.metrics import Source
from elastable.output.noted import CheckpointLog, Curves
from elastable.process.child import EndedChild

if TYPE_CHECKING:
    from elastable.master.core.job_master import Master

View = Callable[[], Mapping[str, object]]
"""The current state of a process; called by one thread at a time."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What a process shows of itself.

    Attributes:
        sources: Name -> metrics.
        not_ready: Why it cannot do its work now, by service; empty: it can.
        view: What its live page shows; None: it has none.
    """

    sources: Mapping[str, Source]
    not_ready: Callable[[], Mapping[str, str]]
    view: View | None = None


_PHASES = ("wait", "sum", "dense", "rows", "callbacks")
_COMMIT_PHASES = ("prepare", "apply", "append")
_MOST_TABLES = 200
_WAITED_S = 1.0  # that a version takes of a store server before the page says so


@dataclass
class JobView:
    """Of a job.

    Attributes:
        not_ready: Why the store cannot be asked now; None: it can.
        curves: Of its metrics.
        resume: The command that goes on with the job.
        ended: Workers that the job's command has started and that have failed.
        started: Unix time, in seconds.
        host: Name of this one.
    """

    master: "Master"
    store: EmbeddingStore
    not_ready: Callable[[], str | None]
    checkpoints: CheckpointLog
    curves: Curves
    resume: str
    ended: Callable[[], Sequence[EndedChild]] = tuple
    started: float = field(default_factory=time.time)
    host: str = field(default_factory=socket.gethostname)

    def __call__(self) -> Mapping[str, object]:
        status, problem = self.master.status(), self.not_ready()
        identities = [*(it.identity for it in status.workers), *(it.identity for it in status.gone)]
        joined = {it.pid for it in identities if it.host == self.host}
        unjoined = [it for it in self.ended() if it.pid not in joined]
        return {
            **_progress(status),
            "kind": "job",
            "time": time.time(),
            "started": self.started,
            "why": self.master.not_ready(),
            "curves": self.curves.points(),
            "phases": _phases(self.master, _commits(self.store if problem is None else None, status)),
            "workers": [*map(_worker, status.workers), *map(_worker, status.gone), *map(self._unjoined, unjoined)],
            "servers": [*map(_server, status.servers)],
            **_store(self.store, problem),
            "checkpoints": [asdict(each) for each in reversed(self.checkpoints.noted())],
            "problems": [*map(self._unjoined_problem, unjoined), *_problems(status, problem, self.checkpoints)],
            "resume": self.resume,
        }

    def _unjoined(self, worker: EndedChild) -> dict[str, object]:
        return {**_worker(GoneWorker(WorkerIdentity("", self.host, worker.pid), 0, 0, 0.0)), "silent_s": None}

    def _unjoined_problem(self, worker: EndedChild) -> dict[str, object]:
        advice = "Look at its log; start another one at any time: elastable worker."
        what = printable(f"It {worker}. It had not joined the job.", 1_000)
        return {"who": f"worker {self.host} pid {worker.pid}", "what": what, "advice": advice, "count": 1}


@dataclass
class ShardView:
    """Of a store server, or of a parameter server.

    Attributes:
        shard: That it serves.
        store: URL of its rows; a login in it is left out.
        not_ready: Why the store cannot be asked now; None: it can.
    """

    shard: Shard
    store: str
    not_ready: Callable[[], str | None]
    started: float = field(default_factory=time.time)

    def __call__(self) -> Mapping[str, object]:
        problem, claim = self.not_ready(), self.shard.ownership.claim
        owner = self.shard.ownership.live_owner()
        serves = "serving clients" if self.shard.clients is not None else "serving a job" if owner else ""
        return {
            **_store(self.shard.store, problem),
            "version": self.shard.store.version() if problem is None else None,
            "kind": "shard" if self.shard.clients is None else "server",
            "state": "failed" if problem is not None else serves or "waiting for a job",
            "store": redacted(self.store),
            "owner": printable(owner, 256, lines=False),
            "job": "" if claim is None else printable(claim.job, 256, lines=False),
            "pushed_bytes": self.shard.buffered_bytes,
            "workers": [],
            "time": time.time(),
            "started": self.started,
            "problems": _store_problems(problem),
        }


def _progress(status: JobStatus) -> dict[str, object]:
    same = ("job", "state", "mode", "store", "version", "epochs", "records_total", "records_per_s", "seconds_left")
    return {
        **{name: getattr(status, name) for name in same},
        "versions": status.versions_total,
        "epoch": min(status.epoch + 1, status.epochs or status.epoch + 1),
        "records": status.records_trained,
        "stream": None if status.stream is None else asdict(status.stream),
        "metrics": {name: value if math.isfinite(value) else None for name, value in status.metrics.items()},
    }


def _phases(master: "Master", commits: Mapping[str, Histogram]) -> list[dict[str, object]]:
    """The time of a version by phase, that of the whole version first; that of "rows" also by phase of the commit."""
    measures = master.measures
    found = {"version": measures.versions.histograms().get("version", Histogram())}
    by_phase = measures.phases.histograms()
    for phase in _PHASES:
        found[phase] = by_phase.get(phase, Histogram())
        if phase == "rows":
            found |= {f"rows: {name}": commits[name] for name in _COMMIT_PHASES if name in commits}
    return [{"phase": name, "mean_s": it.mean_s, "p95_s": it.quantile_s(0.95)} for name, it in found.items()]


def _commits(store: EmbeddingStore | None, status: JobStatus) -> Mapping[str, Histogram]:
    """Commits by phase: of the store, or of all store servers, each of which counts."""
    held = [StoreMeasures(server.shard.commits) for server in status.servers if server.shard is not None]
    return StoreMeasures.of_all(held if store is None or held else [store.measures()]).commits


def _worker(worker: WorkerStatus | GoneWorker) -> dict[str, object]:
    if isinstance(worker, WorkerStatus):
        state, speed, silent_s = "working" if worker.leases else "idle", worker.records_per_s, worker.silent_s
    else:
        state, speed, silent_s = "gone", 0.0, worker.seconds_ago
    who = {"id": worker.identity.incarnation, "host": worker.identity.host, "pid": worker.identity.pid}
    held = {"leases": worker.leases, "micro_batches": worker.micro_batches}
    return {**who, **held, "state": state, "records_per_s": speed, "silent_s": silent_s}


def _server(server: ServerStatus) -> dict[str, object]:
    said = {} if server.shard is None else {**asdict(server.shard), "hit_rate": server.shard.hit_rate}
    said.pop("commits", None)  # shown with the phases of a version
    state = "away" if server.failure else "unknown" if server.shard is None else "waited for"
    if state == "waited for" and server.waited_s < _WAITED_S:
        state = "serving"
    return {**said, "address": server.address, "state": state, "waited_s": server.waited_s}


def _store(store: EmbeddingStore, problem: str | None) -> dict[str, object]:
    """What it holds; nothing where a problem is known, or turns up between two looks of whoever watches the store."""
    found: dict[str, object] = {"store_ready": problem is None, "tables": [], "flush": None, "pins": []}
    with suppress(ElastableError):
        if problem is not None:
            return found
        specs = dict(list(store.specs().items())[:_MOST_TABLES])
        measures, flush = store.measures(), store.flush_status()
        tables = []
        for name, spec in specs.items():
            wanted, read = measures.rows_wanted.get(name, 0), measures.rows_read.get(name, 0)
            hit = max(0.0, 1.0 - read / wanted) if wanted else None
            held = asdict(store.table_statistics(name))
            tables.append({"name": name, "dim": spec.dim, "vocabulary": spec.vocabulary_size, "hit_rate": hit, **held})
        pins = [{"version": pin.version, "rows": pin.rows, "left_s": pin.lease_left_s} for pin in store.pins()]
        found |= {"tables": tables, "flush": None if flush is None else asdict(flush), "pins": pins}
    return found


def _problems(status: JobStatus, problem: str | None, checkpoints: CheckpointLog) -> list[dict[str, object]]:
    """What is wrong, and what to do, the latest first."""
    found = _store_problems(problem)
    for server in status.servers:
        if why := server.failure or (server.shard.failure if server.shard is not None else ""):
            found.append(_problem(f"the store server {server.address}", why))
    if status.stream is not None and status.stream.away:
        found.append(_problem("the stream of events", f"Unavailable: {status.stream.away}"))
    if status.flush is not None and status.flush.failure is not None:
        found.append(_problem("writing rows to the tier", status.flush.failure))
    for it in reversed(status.refusals):
        who = f"worker {it.worker.host} pid {it.worker.pid}" if it.worker.host else "a worker"
        found.append(_problem(who, f"{it.error}: {it.message}", it.count))
    for gone in reversed(status.gone):
        who, lost = f"worker {gone.identity.host} pid {gone.identity.pid}", f"{gone.leases} micro-batches go to others"
        advice = "Look at its log if nobody stopped it; start another one at any time."
        found.append({"who": who, "what": f"It left or died: {lost}.", "advice": advice, "count": 1})
    failed = (each for each in checkpoints.noted() if each.error is not None)
    found += [
        _problem(f"the checkpoint of version {each.version}", f"CheckpointError: {each.error}") for each in failed
    ]
    return found


def _store_problems(problem: str | None) -> list[dict[str, object]]:
    return [] if problem is None else [_problem("the store", problem)]


def _problem(who: str, what: str, count: int = 1) -> dict[str, object]:
    kind = what.partition(":")[0]
    return {"who": who, "what": printable(what, 1_000), "advice": advice_on(kind), "count": count}


# What to do about an error, by its class


_ADVICE: tuple[tuple[type[errors.ElastableError], str], ...] = (
    (
        errors.NotFinite,
        "Drop or fill values that are not finite, lower the learning rate, or train with --not-finite skip.",
    ),
    (errors.BadGradient, "Start master and workers from the same model file and the same release."),
    (errors.NotInstalled, "Install the extra that the message names where the worker runs."),
    (errors.ModelError, "Give the worker the master's model file and the same data, then start it again."),
    (errors.Unauthenticated, "Give the process a token or certificate that the server accepts: docs/security.md."),
    (errors.PermissionDenied, "Give the process the token of a higher role: docs/security.md."),
    (errors.ShardLost, "Start the shard again with its rows, or restore a checkpoint."),
    (errors.TakenOver, "Another job has taken the store; stop one of the two."),
    (errors.StoreBroken, "Restore a checkpoint: --resume with --checkpoint-dir."),
    (errors.StoreFailed, "Look at the store's own log and at its disk; commits are tried again until --deadline."),
    (
        errors.Unavailable,
        "Check that the address is right and that a network policy or firewall lets the port through.",
    ),
    (errors.CheckpointError, "Make room where checkpoints are written; the next one is tried in any case."),
    (errors.BadInput, "Correct what the message names, and start again."),
)


def advice_on(error: str) -> str:
    """One sentence; "" where there is nothing to say that the message does not.

    Args:
        error: Name of the error's class.
    """
    kind = getattr(errors, error, None) if error in errors.__all__ else None
    if not isinstance(kind, type):
        return "Look at the worker's log."
    return next((advice for known, advice in _ADVICE if issubclass(kind, known)), "")
